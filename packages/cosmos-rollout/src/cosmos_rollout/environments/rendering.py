r"""Messages to tokens, each of them once, such that they fit behind tokens that are already there.

A chat template turns a whole conversation into a text. Rendering the conversation again for every
turn would tokenise what the model said a second time, and not always as it was sampled. So only
what is new is rendered, behind a stand-in for the model's last turn::

    template([user "?", assistant MARK, tool "4"], generation prompt)
        = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nMARK<|im_end|>\n<|im_start|>..."
                                              what follows the sampled <|im_end|> ─► tokens

What an environment says is text: a web page with "<|im_end|>" in it ends no turn, but is spelled.
So is one with what the template marks turns by, though it be no special token, as with DeepSeek.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cosmos_rollout.environments.tool_calls import ReadReply, ToolCall, read_reply
from cosmos_rollout.environments.tool_detection import Templated, find_format
from cosmos_rollout.environments.tool_formats import ToolFormatName
from cosmos_rollout.episode import Message
from cosmos_rollout.errors import EpisodeError

_MARK = "3f9c1d27stands8ain4efor0b6areply"
_STAND_IN: Message = {"role": "assistant", "content": _MARK}
_BREAK = "7b1e6c03breaks2dwhat9fa1is4no8token"


class ChatTokenizer(Templated, Protocol):
    """What is used of a Hugging Face tokenizer with a chat template."""

    @property
    def chat_template(self) -> Any:
        """Its source, or several by name; None: it has none."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens beside the vocabulary; ``special`` says which of them are control tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        ...


class ChatRenderer:
    """Renders the turns of a conversation one by one, and reads the model's.

    Args:
        tokenizer: its chat template decides.
        tools: descriptions of tools for the template.
        tool_format: how the model writes calls of them; see `EpisodeLimits`.

    Raises:
        PromptDataError: if the format is one that the tokenizer has to state, and does not; or
            there are tools, and the template writes calls in none of the known ones.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        tools: Sequence[Mapping[str, object]] = (),
        tool_format: ToolFormatName = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        self._tool_format: ToolFormatName = tool_format
        self._format = find_format(tool_format, tokenizer, has_tools=bool(tools))
        self._marks, special = _control_tokens(tokenizer)
        control = sorted(self._marks | special | {_MARK, _BREAK}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, control)))
        self._prompt = self._opened()

    def showing(self, tools: Sequence[Mapping[str, object]]) -> "ChatRenderer":
        """Return one that shows other tools."""
        return ChatRenderer(self._tokenizer, tools, self._tool_format)

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of the first messages, the model's turn opened."""
        return tuple(self._encode(self._text(messages)))

    def following(
        self, messages: Sequence[Message], last_token: int, calls: Sequence[ToolCall] = ()
    ) -> tuple[int, ...]:
        """Return the tokens of messages behind a reply that ended with ``last_token``.

        Args:
            messages: what is new.
            last_token: of the reply.
            calls: that the reply made, for templates which show no result without its call.

        Raises:
            EpisodeError: if the template leaves out what an assistant says.
        """
        plain = [self._plain(message) for message in messages]
        end = self._tokenizer.decode([last_token], skip_special_tokens=False)
        try:
            after = self._unended(self._after(_STAND_IN, plain), end)
        except Exception:  # whatever a template raises
            if not calls:
                raise
            after = self._after_calls(calls, plain).partition(end)[2]
        tokens = self._encode(end + after.removeprefix(end))
        if tokens[:1] == [last_token]:  # behind it a text may be other tokens than alone
            return tuple(tokens[1:])
        return tuple(self._encode(after))

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Return what the model said."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def read(self, token_ids: Sequence[int], *, num_calls: int) -> ReadReply:
        """Take a reply apart that ended by itself.

        Args:
            token_ids: of the reply; the last one ended it.
            num_calls: made before in this conversation.
        """
        text = self._tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
        return read_reply(
            text,
            self._format,
            tools=self._tools or (),
            first=num_calls,
            prompt=self._prompt,
        )

    def _after(self, stand_in: Message, messages: Sequence[Message]) -> str:
        text = self._text([{"role": "user", "content": "?"}, stand_in, *messages])
        _, found, after = text.rpartition(_MARK)
        if not found:
            raise EpisodeError("the chat template leaves out what the assistant said")
        return after

    def _opened(self) -> str:
        """Return how the template opens the model's turn; empty where it refuses to show it."""
        try:
            return self._text([{"role": "user", "content": "?"}])
        except Exception:  # noqa: BLE001 - whatever a template raises
            return ""

    def _text(self, messages: Sequence[Message], *, is_open: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=self._tools,
            add_generation_prompt=is_open,
            tokenize=False,
        )

    def _after_calls(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> str:
        """Return what follows the arguments of calls; templates want them as objects or texts."""
        try:
            return self._after(_calling(calls, _objects), messages)
        except Exception:  # noqa: BLE001 - whatever a template raises
            return self._after(_calling(calls, json.dumps), messages)

    def _unended(self, after: str, end: str) -> str:
        """Leave out the template's end of a turn that has another of the template's ends already.

        Llama's calls end with <|eom_id|> or <|eot_id|>, and a stand-in with the latter.
        """
        begin = self._control.match(after)
        if begin is None or begin[0] == end or end not in self._marks:
            return after
        question = {"role": "user", "content": "?"}
        ended = self._text([question, _STAND_IN], is_open=False).rpartition(_MARK)[2]
        return after.removeprefix(begin[0]) if ended.startswith(begin[0]) else after

    def _plain(self, message: Message) -> Message:
        said = {key: message[key] for key in ("content", "name") if key in message}
        return {**message, **{key: self._spelled(value) for key, value in said.items()}}

    def _spelled(self, content: Any) -> Any:  # a text, a list of parts, or nothing
        """Break up what would be read as control tokens."""
        if content is None:
            return None
        if isinstance(content, str):
            return self._control.sub(lambda found: f"{found[0][0]}{_BREAK}{found[0][1:]}", content)
        return [
            {**part, "text": self._spelled(part["text"])} if part["type"] == "text" else part
            for part in content
        ]

    def _encode(self, text: str) -> list[int]:
        """Return tokens; what was broken up stays apart, and broken Unicode is replaced."""
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        parts = whole.split(_BREAK)
        return [
            token
            for part in parts
            for token in self._tokenizer.encode(part, add_special_tokens=False)
        ]


def _calling(calls: Sequence[ToolCall], told: Callable[[dict[str, Any]], object]) -> Message:
    """Return a stand-in for a reply that made calls, arguments told in one way or another."""
    made = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": told({**call.arguments, _MARK: _MARK})},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _objects(arguments: dict[str, Any]) -> object:
    return arguments


def _control_tokens(tokenizer: ChatTokenizer) -> tuple[set[str], set[str]]:
    """Return tokens that no text may become: those that the template writes, and special ones."""
    template = str(tokenizer.chat_template or "")
    added = [(str(token), bool(token.special)) for token in tokenizer.added_tokens_decoder.values()]
    marks = {text for text, _ in added if text in template and re.search(r"[^\w\s]", text)}
    return marks, {text for text, is_special in added if is_special}
