"""The calls of tools in a reply: which there are, and what is wrong with those that make no sense.

transformers' `parse_response` takes the reply apart by a `ToolFormat`; a call's JSON is read here,
so that one which is broken costs no other, and its model is told what was wrong with it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

from cosmos_rollout.environments.tool_formats import FORMATS, ToolFormat, named_id

_HERMES = FORMATS["hermes"]
_BETWEEN = re.compile(r"(?:[\s;,]|<\|python_tag\|>)*(?=[\[{])")
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that a model asked for.

    Attributes:
        name: of the tool; may be empty if there is a problem.
        arguments: from JSON.
        problem: why the call cannot be made, as the model is to read it, or empty.
        call_id: for the field ``tool_call_id`` of the message that answers it.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    call_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadReply:
    """A reply, taken apart: its calls in order, and what else it says, its thoughts aside."""

    content: str
    calls: tuple[ToolCall, ...]


def read_reply(
    text: str,
    form: ToolFormat = _HERMES,
    *,
    tools: Sequence[Mapping[str, object]] = (),
    first: int = 0,
    prompt: str = "",
) -> ReadReply:
    """Take a reply apart. Calls in its thoughts are none.

    Args:
        text: with control tokens, without the one that ended it.
        form: how calls are written.
        tools: schemas; arguments that are written without types get theirs.
        first: number of its first call among those of the conversation, for ids.
        prompt: what the chat template wrote before it, which may have begun a thought.
    """
    from transformers.utils.chat_parsing import parse_response

    schemas: list[Any] = [dict(tool) for tool in tools]
    try:
        message: Any = parse_response(
            text, dict(form.template), prefix=form.prefix(prompt), tools=schemas
        )
        content, blocks = str(message.get("content") or ""), message.get("tool_calls") or []
    except (ValueError, KeyError, RecursionError) as error:  # of a template not ours
        return ReadReply(content=text, calls=(_wrong(f"the call cannot be read: {error}"),))
    found = [call for block in blocks for call in _calls(block, form)]
    thoughts = str(message.get("thinking") or "")
    if not found and form.mark and text.count(form.mark) > thoughts.count(form.mark):
        found = [_wrong(f"the call is not written as {form.example}")]
    named = (
        replace(call, call_id=named_id(form, call.call_id, call.name, number))
        for call, number in zip(found, count(first), strict=False)
    )
    return ReadReply(content=content.strip(), calls=tuple(named))


def _calls(block: Any, form: ToolFormat) -> Iterator[ToolCall]:  # of a response template
    function = block["function"]
    name, arguments, call_id = function["name"], function["arguments"], block.get("id") or ""
    if isinstance(arguments, Mapping):
        yield _of_tags(name, cast(Mapping[str, Any], arguments), block.get("raw"), form)
    elif not name:
        yield from _unnamed(arguments, form)
    else:
        yield replace(_of_text(name, arguments), call_id=call_id)


def _of_tags(
    name: str, arguments: Mapping[str, Any], raw: str | None, form: ToolFormat
) -> ToolCall:
    rest = re.sub(form.argument, "", raw or "", flags=re.DOTALL).strip()
    if form.argument and rest:
        return _wrong(f"no argument is written as {rest[:100]!r}, but as in {form.example}", name)
    return ToolCall(name=name, arguments=arguments)


def _of_text(name: str, arguments: str) -> ToolCall:
    """Read a call whose name is known; without arguments it may end after the name."""
    try:
        found: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return _wrong(f"the arguments of the call are not JSON: {error}", name)
    return _checked(name, found)


def _unnamed(text: str, form: ToolFormat) -> Iterator[ToolCall]:
    try:
        for found in _values(text) if form.body == "several" else [json.loads(text)]:
            yield _of_json(found, _ARGUMENTS if form.body == "several" else _ARGUMENTS[:1])
    except (ValueError, RecursionError) as error:  # also of numbers and nesting beyond measure
        yield _wrong(f"the call is not JSON: {error}")


def _values(text: str) -> Iterable[Any]:
    """Yield the values of JSON that a text begins with, and those of lists among them."""
    decoder, start = json.JSONDecoder(), 0
    while True:
        found: Any
        found, end = decoder.raw_decode(text, start)
        yield from cast(list[Any], found) if isinstance(found, list) else [found]
        another = _BETWEEN.match(text, end)
        if another is None:
            return
        start = another.end()


def _of_json(found: Any, keys: Sequence[str]) -> ToolCall:
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return _wrong("the call has no text 'name'")
    call = cast(Mapping[str, Any], found)
    key = next((key for key in keys if key in call), keys[0])
    made = _checked(call["name"], call.get(key, {}), key)
    return replace(made, call_id=str(call.get("id") or ""))


def _checked(name: str, arguments: Any, key: str = "arguments") -> ToolCall:  # from JSON
    if not isinstance(arguments, Mapping):
        return _wrong(f"'{key}' of the call have to be an object", name)
    return ToolCall(name=name, arguments=cast(Mapping[str, Any], arguments))


def _wrong(words: str, name: str = "") -> ToolCall:
    return ToolCall(name=name, arguments={}, problem=f"error: {words}")
