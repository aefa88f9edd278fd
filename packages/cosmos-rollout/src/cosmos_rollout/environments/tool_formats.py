r"""How models write calls of tools, one format for each family of chat templates.

A format is a response template: the table by which transformers' `parse_response` takes a reply
apart. It says where a call begins and ends and which part of it is the name; here are what the
models of each family were trained on. Names are those of vLLM's ``--tool-call-parser`` where it
has one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ToolFormatName = Literal[
    "auto",
    "hermes",
    "llama3_json",
    "mistral",
    "qwen3_coder",
    "deepseek_v3",
    "harmony",
    "glm45",
    "kimi_k2",
    "response_template",
]
Body = Literal["one", "several"]
_STATED: ToolFormatName = "response_template"
_START = "<start of the reply>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        name: in recipes.
        template: a response template whose field ``tool_calls`` has, for each call, a ``function``
            of ``name`` and ``arguments``: an object, or a text of JSON. Where the name is empty,
            that text holds it too. Beside it may be the call's ``id`` and, where arguments are
            tags, ``raw``, what they were read from.
        mark: a reply with this and without a call tried to make one; empty: that is not known.
        example: of a call, for a model that got it wrong.
        body: whether a text with the name in it is "one" call, or "several".
        argument: what one argument looks like, where they are tags.
        id_pattern: what an id has to be for the chat template to show a result.
        id_form: an id, of ``number`` among those of the conversation and ``name``.
        thoughts: what a thought begins with, which a chat template may write itself; empty: it is
            told in another way.
    """

    name: str
    template: Mapping[str, Any]
    mark: str = ""
    example: str = ""
    body: Body = "one"
    argument: str = ""
    id_pattern: str = ".+"
    id_form: str = "call_{number}"
    thoughts: str = "<think>"

    def prefix(self, prompt: str) -> str:
        """Return what a reply is read behind: how its chat template has begun it.

        Args:
            prompt: what the template writes of a conversation with the model's turn opened.
        """
        if self.name == _STATED:
            return prompt
        is_open = self.thoughts and prompt.rstrip().endswith(self.thoughts)
        return _START + self.thoughts if is_open else ""


def _template(
    opens: str,
    closes: str,
    *,
    argument: str = "",
    content: Mapping[str, Any] | None = None,
    thoughts: tuple[str, str] = ("<think>", "</think>"),
) -> Mapping[str, Any]:
    """Return a response template. What a model thinks of calling in its thoughts is no call.

    Args:
        opens: pattern of a call's beginning, with the groups ``name`` and ``id``, one of which or
            both may be empty; with ``raw`` if arguments are tags.
        closes: pattern of its end.
        argument: pattern of an argument that is a tag, with the groups ``key`` and ``value``.
        content: what else is said; all the rest by default.
        thoughts: what they begin and end with, unless ``content`` tells them apart.
    """
    call: dict[str, Any] = {
        "id": "{id}",
        "function": {"name": "{name}", "arguments": "{content}"},
    }
    parsed: dict[str, Any] = {"content": "text"}
    if argument:
        call["raw"] = "{raw}"
        parsed = {"content": "xml-inline", "content_args": {"tag_pattern": argument}}
    rest = {"repeats": True, "join": "", "content_args": {"strip": False}}
    calls = {
        "open_pattern": opens,
        "close_pattern": closes,
        "repeats": True,
        "transform": call,
        **parsed,
    }
    fields: dict[str, Any] = {"content": content or rest, "tool_calls": calls}
    if content is None:
        opening, ending = thoughts
        fields["thinking"] = {"open": opening, "close": ending, "repeats": True, "join": ""}
    return {"start_anchor": _START, "fields": fields}


_PARAMETER = r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
_FUNCTION_END = r"</function>\s*(?:</tool_call>|(?=<function=)|\Z)"
_PAIR = (
    r"<arg_key>\s*(?P<key>[^<]*?)\s*</arg_key>\s*"
    r"<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>"
)
_DEEPSEEK = {
    name: f"<\uff5ctool▁{name}\uff5c>"
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
}
_HARMONY_HEADER = (
    r"(?P<id>)(?:\A|<\|start\|>assistant|<\|channel\|>(?:commentary|analysis))\s*"
    r"to=(?:functions\.)?(?P<name>[^\s<]+)"
    r"\s*(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
)

_ALL = (
    ToolFormat(
        name="hermes",
        template=_template(r"(?P<id>)(?P<name>)<tool_call>(?=.*?</tool_call>)", r"</tool_call>"),
        example='<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    ),
    ToolFormat(
        name="llama3_json",
        # a reply may also be JSON without calling anything
        template=_template(
            r"(?P<id>)(?P<name>)(?:<\|python_tag\|>"
            r'|(?:\A|(?<=</think>))\s*(?=\{(?=.*"name"\s*:).*"(?:parameters|arguments)"\s*:))',
            r"\Z",
        ),
        example='{"name": "f", "parameters": {"a": 1}}',
        body="several",
    ),
    ToolFormat(
        name="mistral",
        template=_template(
            r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]*)(?:\[CALL_ID\])?"
            r"(?P<id>(?<=\[CALL_ID\])\w*|)(?:\[ARGS\])?",
            r"(?=\[TOOL_CALLS\])|\Z",
            thoughts=("[THINK]", "[/THINK]"),
        ),
        mark="[TOOL_CALLS]",
        example='[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}] or [TOOL_CALLS]f[ARGS]{"a": 1}',
        body="several",
        id_pattern="[a-zA-Z0-9]{9}",
        id_form="{number:09d}",
        thoughts="[THINK]",
    ),
    ToolFormat(
        name="qwen3_coder",
        template=_template(
            r"(?P<id>)(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>"
            rf"(?=(?P<raw>.*?)(?:{_FUNCTION_END}|\Z))",
            _FUNCTION_END,
            argument=_PARAMETER,
        ),
        mark="<tool_call>",
        example="<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        argument=_PARAMETER,
    ),
    ToolFormat(
        name="deepseek_v3",
        template=_template(
            rf"(?P<id>)(?:{_DEEPSEEK['calls▁begin']}\s*)?{_DEEPSEEK['call▁begin']}"
            rf"(?:function{_DEEPSEEK['sep']}(?=[^\s{{]+\n))?"
            rf"(?P<name>[^\s<]+)(?:\s*```json\s*|{_DEEPSEEK['sep']})",
            rf"(?:\s*```)?\s*{_DEEPSEEK['call▁end']}(?:\s*{_DEEPSEEK['calls▁end']})?",
        ),
        mark=_DEEPSEEK["call▁begin"],
        example='{call▁begin}f{sep}{{"a": 1}}{call▁end}'.format_map(_DEEPSEEK),
    ),
    ToolFormat(
        name="harmony",
        template=_template(
            _HARMONY_HEADER,
            r"<\|call\|>|(?=<\|(?:start|end|return|channel)\|>)",
            content={
                "open": "<|channel|>final<|message|>",
                "close_pattern": r"<\|(?:end|return)\|>|(?=<\|start\|>)",
            },
        ),
        mark="commentary to=functions.",
        thoughts="",
        example='<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
    ),
    ToolFormat(
        name="glm45",
        template=_template(
            r"(?P<id>)<tool_call>\s*(?P<name>[^\s<]+)(?=(?P<raw>.*?)(?:</tool_call>|\Z))",
            r"</tool_call>",
            argument=_PAIR,
        ),
        mark="<tool_call>",
        example="<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        argument=_PAIR,
    ),
    ToolFormat(
        name="kimi_k2",
        template=_template(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
            r"(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        ),
        mark="<|tool_call_begin|>",
        example="<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|>',
        id_pattern=r"functions\..+:\d+",
        id_form="functions.{name}:{number}",
    ),
)
FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _ALL}


def stated_format(template: Mapping[str, Any]) -> ToolFormat:
    """Return the format that a tokenizer's own response template states."""
    return ToolFormat(name=_STATED, template=template)


def named_id(form: ToolFormat, written: str, name: str, number: int) -> str:
    """Return a call's id: as the model wrote it, if the chat template takes that."""
    if re.fullmatch(form.id_pattern, written):
        return written
    return form.id_form.format(number=number, name=name)
