"""Calls of tools as models of other families write them, on literal replies of each."""

import json

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from cosmos_rollout.environments.tool_calls import read_reply
from cosmos_rollout.environments.tool_formats import FORMATS

BAR = "\uff5c"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "number"},
                    "note": {"type": "string"},
                    "deep": {"type": "object"},
                    "yes": {"type": "boolean"},
                },
            },
        },
    }
]


def read(form: str, text: str, first: int = 0, prompt: str = ""):
    return read_reply(text, FORMATS[form], tools=TOOLS, first=first, prompt=prompt)


def deepseek(text: str) -> str:
    return text.replace("|", BAR)


ADD = {"a": 2, "note": "<b> } 'x'\n"}
JSON = json.dumps(ADD)


@pytest.mark.parametrize(
    ("form", "text", "names", "ids", "content"),
    [
        (
            "hermes",
            f'So: <tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>\n'
            f'<tool_call>{{"name": "f", "arguments": {JSON}}}</tool_call>',
            ["add", "f"],
            ["call_0", "call_1"],
            "So:",
        ),
        ("llama3_json", f'{{"name": "add", "parameters": {JSON}}}', ["add"], ["call_0"], ""),
        (
            "llama3_json",
            f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {JSON}}}; '
            f'{{"name": "f", "arguments": {JSON}}} as you see',
            ["add", "f"],
            ["call_0", "call_1"],
            "",
        ),
        (
            "mistral",
            f'[TOOL_CALLS] [{{"name": "add", "arguments": {JSON}, "id": "VvvODy9mT"}}, '
            f'{{"name": "f", "arguments": {JSON}, "id": "short"}}]',
            ["add", "f"],
            ["VvvODy9mT", "000000001"],
            "",
        ),
        (
            "mistral",
            f"Now.[TOOL_CALLS]add[CALL_ID]aaaaaaaa9[ARGS]{JSON}[TOOL_CALLS]f[ARGS]{JSON}",
            ["add", "f"],
            ["aaaaaaaa9", "000000001"],
            "Now.",
        ),
        (
            "deepseek_v3",
            deepseek(
                "Hm.<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>add\n"
                f"```json\n{JSON}\n```<|tool▁call▁end|>\n"
                f"<|tool▁call▁begin|>function<|tool▁sep|>f\n```json\n{JSON}\n"
                "```<|tool▁call▁end|><|tool▁calls▁end|>"
            ),
            ["add", "f"],
            ["call_0", "call_1"],
            "Hm.",
        ),
        (  # of V3.1
            "deepseek_v3",
            deepseek(
                f"<|tool▁calls▁begin|><|tool▁call▁begin|>add<|tool▁sep|>{JSON}<|tool▁call▁end|>"
                f"<|tool▁call▁begin|>function<|tool▁sep|>{JSON}<|tool▁call▁end|><|tool▁calls▁end|>"
            ),
            ["add", "function"],
            ["call_0", "call_1"],
            "",
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>to=functions.no<|end|><|start|>assistant"
            f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{JSON}",
            ["add"],
            ["call_0"],
            "",
        ),
        (
            "harmony",
            f" to=functions.add<|channel|>commentary json<|message|>{JSON}<|call|>",
            ["add"],
            ["call_0"],
            "",
        ),
        (
            "kimi_k2",
            "Let me.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:3"
            f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>f"
            f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
            ["add", "f"],
            ["functions.add:3", "functions.f:1"],
            "Let me.",
        ),
    ],
)
def test_calls_are_read_in_the_format_of_each_family(form, text, names, ids, content):
    found = read(form, text)
    assert [call.problem for call in found.calls] == [""] * len(names)
    assert [call.name for call in found.calls] == names
    assert [call.arguments for call in found.calls] == [ADD] * len(names)
    assert [call.call_id for call in found.calls] == ids
    assert found.content == content


TYPED = {"a": 2, "b": 0.5, "note": "7", "deep": {"x": [1]}, "yes": True}


@pytest.mark.parametrize(
    ("form", "begin", "pair", "end"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n",
            "<parameter={}>\n{}\n</parameter>\n",
            "</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>add\n",
            "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
            "</tool_call>",
        ),
    ],
)
def test_arguments_that_are_tags_have_the_types_of_the_schema(form, begin, pair, end):
    said = {"a": "2", "b": "0.5", "note": "7", "deep": '{"x": [1]}', "yes": "True"}
    body = "".join(pair.format(*item) for item in said.items())
    found = read(form, f"I add.\n{begin}{body}{end}\n{begin}{end}")
    assert found.content == "I add."
    assert [(call.name, call.arguments) for call in found.calls] == [("add", TYPED), ("add", {})]
    (lines,) = read(form, begin + pair.format("note", " a\n\n  b < c") + end).calls
    assert lines.arguments == {"note": " a\n\n  b < c"}


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("llama3_json", '<|python_tag|>print("x")', "error: the call is not JSON: "),
        ("llama3_json", '{"name": "add", "parameters": {"a": }', "error: the call is not JSON: "),
        (
            "llama3_json",
            '{"name": "add", "parameters": 3}',
            "error: 'parameters' of the call have to be an object",
        ),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a"', "error: the arguments of the call are not JSON: "),
        ("mistral", "[TOOL_CALLS] []", "error: the call is not written as [TOOL_CALLS][{"),
        ("mistral", '[TOOL_CALLS] [{"name": 1}]', "error: the call has no text 'name'"),
        (
            "qwen3_coder",
            '<tool_call>{"name": "add"}</tool_call>',
            "error: the call is not written as <tool_call><function=f>",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=add><parameter=a>2</function></tool_call>",
            "error: no argument is written as '<parameter=a>2'",
        ),
        ("glm45", "<tool_call>add {}</tool_call>", "error: no argument is written as '{}'"),
        (
            "deepseek_v3",
            deepseek("<|tool▁call▁begin|>add{}<|tool▁call▁end|>"),
            deepseek("error: the call is not written as <|tool▁call▁begin|>f<|tool▁sep|>{"),
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.add <|constrain|>json<|message|>a: 2",
            "error: the arguments of the call are not JSON: ",
        ),
        ("kimi_k2", "<|tool_call_begin|>add{}", "error: the call is not written as <|tool_call"),
    ],
)
def test_a_call_that_makes_no_sense_says_what_is_wrong(form, text, words):
    (call,) = read(form, text).calls
    assert call.problem.startswith(words)
    assert call.call_id


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_without_calls_is_one(form):
    for text in ("It is 4.", '{"answer": 4}', '["name"]', "", "<b>4</b>"):
        assert read(form, text).calls == ()


def test_one_broken_call_costs_no_other():
    text = f'<tool_call>{{</tool_call><tool_call>{{"name": "f", "arguments": {JSON}}}</tool_call>'
    broken, whole = read("hermes", text, first=4).calls
    assert broken.problem.startswith("error: the call is not JSON: ")
    assert (whole.name, whole.call_id, whole.problem) == ("f", "call_5", "")


@pytest.mark.parametrize("form", FORMATS)
def test_a_long_reply_of_nothing_but_beginnings_is_read_in_time(form):
    begins = FORMATS[form].mark or "<tool_call>"
    assert len(read(form, begins * 2000).calls) <= 2000


CALLS = {
    "hermes": f'<tool_call>{{"name": "add", "arguments": {JSON}}}</tool_call>',
    "llama3_json": f'{{"name": "add", "parameters": {JSON}}}',
    "mistral": f"[TOOL_CALLS]add[ARGS]{JSON}",
    "qwen3_coder": "<tool_call><function=add><parameter=a>2</parameter></function></tool_call>",
    "deepseek_v3": deepseek(f"<|tool▁call▁begin|>add<|tool▁sep|>{JSON}<|tool▁call▁end|>"),
    "glm45": "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
    "kimi_k2": "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|>",
}


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("prompt", ["", "<a>", "<a><think>", "<a><think>\n"])
def test_calls_in_thoughts_are_none_whoever_began_the_thought(form, prompt):
    opens, closes = ("[THINK]", "[/THINK]") if form == "mistral" else ("<think>", "</think>")
    prompt, call = prompt.replace("<think>", opens), CALLS[form]
    begun = "" if opens in prompt else opens
    thought = f"{begun}I could say {call} or not{closes}"
    (found,) = read(form, f"{thought}\n\n{call}", prompt=prompt).calls
    assert (found.name, found.arguments["a"], found.problem) == ("add", 2, "")
    said = read(form, f"{thought}\n\nIt is 4.", prompt=prompt)
    assert (said.content, said.calls) == ("It is 4.", ())
    endless = read(form, f"{begun}I could say {call}", prompt=prompt)
    assert (endless.content, endless.calls) == ("", ())


def test_marks_of_thoughts_in_an_argument_are_its_text():
    text = CALLS["hermes"].replace("'x'", "<think>")
    (call,) = read("hermes", text).calls
    assert call.arguments["note"] == "<b> } <think>\n"
