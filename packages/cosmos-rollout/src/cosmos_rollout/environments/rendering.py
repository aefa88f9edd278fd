r"""Messages to tokens, each of them once, such that they fit behind tokens that are already there.

A chat template turns a whole conversation into a text. Rendering the conversation again for every
turn would tokenise what the model said a second time, and not always as it was sampled. So only
what is new is rendered, behind a stand-in for the model's last turn::

    template([user "?", assistant MARK, tool "4"], generation prompt)
        = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nMARK<|im_end|>\n<|im_start|>..."
                                              what follows the sampled <|im_end|> ─► tokens

What an environment says is text: a web page with "<|im_end|>" in it ends no turn, but is spelled.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cosmos_rollout.episode import Message
from cosmos_rollout.errors import EpisodeError

_MARK = "3f9c1d27stands8ain4efor0b6areply"
_BREAK = "7b1e6c03breaks2dwhat9fa1is4no8token"


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer with a chat template."""

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

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> Any:  # a text, if ``tokenize`` is False
        """Return a conversation as the model wants it, the next turn opened."""
        ...


class ChatRenderer:
    """Renders the turns of a conversation one by one.

    Args:
        tokenizer: its chat template decides.
        tools: descriptions of tools for the template.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, tools: Sequence[Mapping[str, object]] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        added = tokenizer.added_tokens_decoder.values()
        control = sorted((str(token) for token in added if token.special), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, control)) or "(?!)")

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of the first messages, the model's turn opened."""
        return tuple(self._encode(self._text(messages)))

    def following(self, messages: Sequence[Message], last_token: int) -> tuple[int, ...]:
        """Return the tokens of messages behind a reply that ended with ``last_token``.

        Raises:
            EpisodeError: if the template leaves out what an assistant says.
        """
        stand_in = {"role": "assistant", "content": _MARK}
        plain = ({**message, "content": self._spelled(message["content"])} for message in messages)
        text = self._text([{"role": "user", "content": "?"}, stand_in, *plain])
        _, found, after = text.rpartition(_MARK)
        if not found:
            raise EpisodeError("the chat template leaves out what the assistant said")
        end = self._tokenizer.decode([last_token], skip_special_tokens=False)
        tokens = self._encode(end + after.removeprefix(end))
        if tokens[:1] == [last_token]:  # behind it a text may be other tokens than alone
            return tuple(tokens[1:])
        return tuple(self._encode(after))

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Return what the model said."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _text(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=self._tools,
            add_generation_prompt=True,
            tokenize=False,
        )

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
