"""Which format of calls a tokenizer's chat template has: the one in which it writes a call."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from cosmos_rollout.environments.tool_calls import read_reply
from cosmos_rollout.environments.tool_formats import (
    FORMATS,
    ToolFormat,
    ToolFormatName,
    stated_format,
)
from cosmos_rollout.errors import PromptDataError

_NAME, _KEY, _VALUE = "probe", "key", "value"
_MOST_SAID = 200
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": ""}},
            "required": [_KEY],
        },
    },
}
_LAST_TOKEN = re.compile(r"(?:</s>|<[|\uff5c][^<>]*[|\uff5c]>)\s*\Z")


class Templated(Protocol):
    """A tokenizer with a chat template."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> Any:  # a text, if ``tokenize`` is False
        """Return a conversation as the model wants it; the next turn opened, if asked for."""
        ...


def find_format(
    name: ToolFormatName, tokenizer: Templated, *, has_tools: bool = True
) -> ToolFormat:
    """Return a format by its name.

    "auto" is the one in which the chat template writes a call; then what the tokenizer states;
    then Hermes', as many a model without a word of tools in its template was told in the prompt.

    Raises:
        PromptDataError: if the tokenizer has to state it, and does not, or there are tools and the
            template writes calls of them in a form that is none of those known.
    """
    if name in FORMATS:
        return FORMATS[name]
    stated: Mapping[str, Any] | None = getattr(tokenizer, "response_template", None)
    if name == "response_template" and not stated:
        raise PromptDataError(
            'tool_format is "response_template", and the tokenizer has no response template'
        )
    written = list(_calls_written(tokenizer)) if name == "auto" else []
    for said in written:
        for form in FORMATS.values():
            if _is_read(said, form):
                return form
    if stated is not None and "tool_calls" in stated.get("fields", {}):
        return stated_format(stated)
    unread = next((said for said in written if _NAME in said and _VALUE in said), "")
    if unread and has_tools:
        raise PromptDataError(
            f"the chat template writes a call of a tool as {unread.strip()[-_MOST_SAID:]!r}, which "
            f"none of the known formats is ({', '.join(FORMATS)}); name the one in which the model "
            "calls tools by tool_format"
        )
    return FORMATS["hermes"]


def _is_read(text: str, form: ToolFormat) -> bool:
    calls = read_reply(text, form, tools=[_TOOL]).calls
    return any((call.name, call.arguments) == (_NAME, {_KEY: _VALUE}) for call in calls)


def _calls_written(tokenizer: Templated) -> Iterator[str]:
    """Yield what a template makes of a turn that calls a tool, told in the ways there are."""
    question = {"role": "user", "content": "?"}
    for arguments in ({_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'):
        for content in ("", None):
            function = {"name": _NAME, "arguments": arguments}
            call = {"id": "functions0", "type": "function", "function": function}
            for call_id in ("a1b2c3d4e", f"functions.{_NAME}:0"):
                turn = {
                    "role": "assistant",
                    "content": content,
                    "tool_calls": [{**call, "id": call_id}],
                }
                try:
                    asked = [_rendered(tokenizer, [question], is_open=o) for o in (True, False)]
                    whole = _rendered(tokenizer, [question, turn], is_open=False)
                except Exception:  # noqa: BLE001 - a template may raise anything
                    continue
                said = _behind(asked, whole)
                yield _LAST_TOKEN.sub("", said)
                yield said  # what ends the turn may end the call


def _behind(beginnings: Sequence[str], whole: str) -> str:
    """Return a text without the first of these that it begins with.

    What opens a turn may open a thought too, which the turn itself is written without. Left in,
    the examples of how to call a tool would be read as calls.
    """
    found = next((text for text in beginnings if whole.startswith(text)), "")
    return whole.removeprefix(found)


def _rendered(tokenizer: Templated, turns: Sequence[dict[str, Any]], *, is_open: bool) -> str:
    return tokenizer.apply_chat_template(
        list(turns), tools=[_TOOL], add_generation_prompt=is_open, tokenize=False
    )
