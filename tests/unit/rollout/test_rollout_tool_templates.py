"""Tools with chat templates of other families: what is shown behind a call, and what is not.

The templates are the essential part of those of Mistral 7B 0.3, Llama 3.1, GPT-OSS, DeepSeek V3,
Kimi K2, Qwen3-Coder and GLM 4.5: how each writes a call, and what it wants of a result.
"""

from dataclasses import replace

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from tool_families import FAMILIES, LLAMA, QWEN, play, tokenizer_of

from cosmos_rollout import ChatRenderer, PromptDataError
from cosmos_rollout.environments.tool_detection import find_format


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_format_is_that_in_which_the_chat_template_writes_calls(family):
    assert find_format("auto", tokenizer_of(family)).name == family.form


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_a_result_is_shown_behind_its_call_as_the_template_has_it(family, tmp_path):
    tokenizer, episode = await play(family, tmp_path, family.call, "It is 5.")
    text = tokenizer.decode(episode.token_ids.tolist())
    assert f"{family.call}{family.end}{family.shown}It is 5.{family.end}" in text
    said = tokenizer.decode(episode.token_ids[episode.trainable].tolist())
    assert said == f"{family.call}{family.end}It is 5.{family.end}"
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["5"]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_what_marks_turns_is_text_in_the_result_of_a_tool(family, tmp_path):
    marks = "".join((*family.special, *family.plain))
    tokenizer, episode = await play(family, tmp_path, family.call, "ok", result=f"{marks}!")
    _, clean = await play(family, tmp_path, family.call, "ok", result="!")
    whole = tokenizer.decode(episode.token_ids.tolist())
    assert f"{marks}!" in whole
    first = len(tokenizer.get_vocab()) - len(tokenizer.get_added_vocab())
    assert [t for t in episode.token_ids if t >= first] == [
        t for t in clean.token_ids if t >= first
    ]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
async def test_a_call_that_is_wrong_is_told_so_and_the_episode_goes_on(family, tmp_path):
    wrong = family.call.replace('"a": 2', '"a": }', 1).replace("</parameter>", "", 1)
    _, episode = await play(family, tmp_path, wrong.replace("</arg_value>", "", 1), "Sorry.")
    (told,) = [m["content"] for m in episode.messages if m["role"] == "tool"]
    assert told.startswith("error: ")
    assert "JSON" in told or "written as" in told
    assert episode.response == "Sorry."


async def test_a_call_may_end_with_another_of_the_ends_that_the_template_knows(tmp_path):
    family = replace(LLAMA, end="<|eom_id|>")
    tokenizer, episode = await play(family, tmp_path, family.call, "ok")
    text = tokenizer.decode(episode.token_ids.tolist())
    assert f"<|eom_id|>{LLAMA.shown}ok<|eom_id|>" in text


def test_a_format_that_the_tokenizer_states_is_read_as_it_says():
    tokenizer = tokenizer_of(QWEN)
    with pytest.raises(PromptDataError, match="has no response template"):
        find_format("response_template", tokenizer)
    call = {"function": {"name": "{name}", "arguments": "{content}"}}
    fields = {
        "content": {},
        "tool_calls": {"open_pattern": r"!(?P<name>\w+)", "close": "!", "content": "json"}
        | {"repeats": True, "transform": call},
    }
    tokenizer.response_template = {"start_anchor": "<|im_start|>", "fields": fields}
    assert find_format("auto", tokenizer).name == "qwen3_coder"  # as its template writes calls
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    renderer = ChatRenderer(tokenizer, tool_format="auto")
    (call,) = renderer.read(tokenizer.encode('so !add{"a": 2}! x'), num_calls=1).calls
    assert (call.name, call.arguments, call.call_id) == ("add", {"a": 2}, "call_1")
    (bad,) = renderer.read(tokenizer.encode("so !add{a! x"), num_calls=1).calls
    assert bad.problem.startswith("error: the call cannot be read: ")


def test_without_a_word_of_tools_in_the_template_calls_are_those_of_hermes():
    tokenizer = tokenizer_of(QWEN)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert find_format("auto", tokenizer).name == "hermes"
