"""Chat templates as they were released, whole: tools are called and answered by them to the token.

They are those that TRL carries; nothing of it is imported.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from tool_families import DEEPSEEK, GLM, HARMONY, LLAMA, QWEN, Family, play, tokenizer_of

from cosmos_rollout import ChatRenderer, PromptDataError
from cosmos_rollout.environments.tool_detection import find_format

HERMES = Family(
    form="hermes",
    template="",
    call='<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    end="<|im_end|>",
    shown="",
    special=("<|im_start|>", "<|im_end|>"),
    plain=("<tool_call>", "</tool_call>"),
)
RELEASED = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"), HERMES),
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"), QWEN),
    **dict.fromkeys((f"nemotron_3_{n}" for n in ("nano", "super", "ultra")), QWEN),
    **dict.fromkeys(("llama3_1", "llama3_2"), LLAMA),
    "gptoss": HARMONY,
    "deepseekv3": DEEPSEEK,
    "glm4moe": GLM,
}
UNREAD = ("gemma4", "lfm2_v2", "muse_glimmer")


def released(name: str) -> str:
    """Return the text of a template."""
    found = importlib.util.find_spec("trl")
    if found is None:
        pytest.importorskip("trl")
    (folder,) = found.submodule_search_locations
    return (Path(folder) / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", RELEASED)
async def test_a_tool_is_called_and_answered_as_the_released_template_writes_it(
    name: str, tmp_path: Path
) -> None:
    family = replace(RELEASED[name], template=released(name))
    opened = ChatRenderer(tokenizer_of(family)).opening([{"role": "user", "content": "?"}])
    begun = tokenizer_of(family).decode(opened)
    thought = "2 and 3\n</think>\n\n" if begun.endswith("<think>\n") else ""
    said = (f"{thought}{family.call}{family.end}", f"{thought}It is 5.{family.end}")
    tokenizer, episode = await play(family, tmp_path, *(s.removesuffix(family.end) for s in said))
    assert find_format("auto", tokenizer).name == family.form
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[2]["content"] == "5"
    ids = episode.token_ids.tolist()
    assert tokenizer.decode(episode.token_ids[episode.trainable].tolist()) == "".join(said)
    whole = tokenizer.decode(ids)
    shown = whole.partition(said[0])[2].partition(said[1])[0]
    template = tokenizer.apply_chat_template(
        as_called(family, episode.messages[0]), tokenize=False, add_generation_prompt=True
    )
    assert shown.strip()
    assert template.endswith(shown), (shown, template)


def as_called(family: Family, question: dict[str, object]) -> list[dict[str, object]]:
    """Return a conversation up to the answer of the tool, as the template itself takes it."""
    is_text = family.form == "deepseek_v3"  # arguments are JSON there, and content is none
    arguments = '{"a": 2, "b": 3}' if is_text else {"a": 2, "b": 3}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turn = {"role": "assistant", "content": None if is_text else "", "tool_calls": [call]}
    return [question, turn, {"role": "tool", "content": "5", "tool_call_id": "c", "name": "add"}]


@pytest.mark.parametrize("name", UNREAD)
def test_calls_that_nobody_could_read_are_refused_where_there_are_tools(name: str) -> None:
    tokenizer = tokenizer_of(replace(HERMES, template=released(name)))
    with pytest.raises(PromptDataError, match=r"a call of a tool as .*probe.*by tool_format"):
        find_format("auto", tokenizer)
    assert find_format("hermes", tokenizer).name == "hermes"
    assert find_format("auto", tokenizer, has_tools=False).name == "hermes"
