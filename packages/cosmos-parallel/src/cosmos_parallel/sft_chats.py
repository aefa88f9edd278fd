"""Conversations as tokens, with a mask of what the assistant says, under any chat template.

What is trained is what a model would see and say: each answer follows what the template writes of
the turns before it where it is prompted for. A template that writes earlier turns otherwise once
later ones follow, as those that forget thoughts do, makes several examples of one conversation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_core.media import text_of
from cosmos_parallel.errors import SftDataError
from cosmos_parallel.sft_examples import SftExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# a template that marks what the assistant says
_MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One conversation under one template; ``where`` is named in errors."""

    tokenizer: "PreTrainedTokenizerBase"
    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = field(default=None)

    def encode(self, end: int, *, prompting: bool = False, marking: bool = False) -> Any:
        """Apply the template to the messages before ``end``.

        Args:
            end: how many messages.
            prompting: add what would prompt for an answer.
            marking: say which tokens the template marks as generated.
        """
        form = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": marking}
        return self._applied(end, prompting, form)

    def write(self, end: int, *, prompting: bool) -> str:
        """Apply the template as `encode` does, for its text."""
        return str(self._applied(end, prompting, {"tokenize": False}))

    def _applied(self, end: int, prompting: bool, form: dict[str, Any]) -> Any:
        from jinja2 import TemplateError

        try:
            # a text, or a BatchEncoding, whose stubs do not say what its values are
            applied: Any = self.tokenizer.apply_chat_template(
                self.messages[:end], tools=self.tools, add_generation_prompt=prompting, **form
            )
        except (TemplateError, ValueError, TypeError) as error:  # whatever its expressions raise
            raise SftDataError(
                f"{self.where}: the chat template refuses the messages: {error}"
            ) from error
        return applied


def encode_chat(chat: Chat, name: str) -> list[tuple[SftExample, int]]:
    """Return the examples of a conversation, and of how many of its messages each is.

    Tokens of a picture are still one mark.

    Args:
        chat: the conversation.
        name: its field in the row, for errors.

    Raises:
        SftDataError: if nobody answers in it, or the chat template cannot be used.
    """
    roles = sorted({str(message["role"]) for message in chat.messages})
    if "assistant" not in roles:
        raise SftDataError(
            f"{chat.where}: field {name!r} has no message of the assistant to train on (roles: "
            f"{', '.join(roles) or 'none'}; that of the answers must be 'assistant')"
        )
    if chat.tokenizer.chat_template is None:
        raise SftDataError(
            f"{chat.where}: has {name!r}, but the tokenizer has no chat template; give rows of "
            "'prompt' and 'response', or a tokenizer with a chat template"
        )
    if _MARKS_GENERATION.search(str(chat.tokenizer.chat_template)):
        return [(_marked_by_template(chat), len(chat.messages))]
    return _marked_by_prefixes(chat)


def _marked_by_template(chat: Chat) -> SftExample:
    encoded = chat.encode(len(chat.messages), marking=True)
    mask = np.asarray(encoded["assistant_masks"], dtype=np.bool_)
    if not mask.any():
        raise SftDataError(
            f"{chat.where}: the chat template marks nothing as generated, so nothing is trained on"
        )
    return SftExample(
        token_ids=np.asarray(token_ids_of(encoded), dtype=np.int32),
        trainable=mask,
    )


def _marked_by_prefixes(chat: Chat) -> list[tuple[SftExample, int]]:
    """Tell the assistant's tokens by what the template adds for each of its messages.

    Where it writes what was said before otherwise for the next, that begins another example.
    """
    found: list[tuple[SftExample, int]] = []
    parts: list[tuple[list[int], bool]] = []
    done: list[int] = []
    before = (0, False)
    for index, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        prompt = token_ids_of(chat.encode(index, prompting=True)) if index else _opening(chat)
        added = _added(chat, (done, before), (prompt, (index, False)))
        if added is None:
            found.append((joined(parts), before[0]))
            parts, added = [], prompt
        answered = token_ids_of(chat.encode(index + 1))
        answer = _added(chat, (prompt, (index, False)), (answered, (index + 1, True)))
        if answer is None:
            raise SftDataError(
                f"{chat.where}: message {index}: the chat template does not write the answer "
                "behind what it prompts for it with, so what is trained cannot be told apart; give "
                "the tokenizer a template that does, or that marks answers by {% generation %}"
            )
        parts += [(added, False), (answer, True)]
        done, before = answered, (index + 1, True)
    return [*found, (joined(parts), before[0])]


# up to which message a conversation is written, and whether with its text or what prompts for it
_Place = tuple[int, bool]


def _added(
    chat: Chat, before: tuple[list[int], _Place], now: tuple[list[int], _Place]
) -> list[int] | None:
    """Return the tokens that the template adds; ``None`` if it writes otherwise what was there.

    Its first may join those before it: an answer that begins with a new line does after a prompt
    that ends with one. Where generation begins, a token does.
    """
    (done, early), (ids, late) = before, now
    if ids[: len(done)] == done:
        return ids[len(done) :]
    written, longer = (chat.write(end, prompting=not said) for end, said in (early, late))
    if not longer.startswith(written):
        return None
    return token_ids_of(chat.tokenizer(longer[len(written) :], add_special_tokens=False))


def _opening(chat: Chat) -> list[int]:
    """Return what the template writes before the text of a first message, if the assistant's.

    That is what it would prompt with, and what comes before: a system text of its own, say. Where
    the text begins is seen by comparison with another text.
    """
    asked = replace(chat, messages=[{"role": "user", "content": "a"}])
    plain, prompting = (token_ids_of(asked.encode(1, prompting=asks)) for asks in (False, True))
    prompt = prompting[len(plain) :]
    content = text_of(chat.messages[0]["content"])
    other = {"role": "assistant", "content": "b" if content.startswith("a") else "a"}
    said = token_ids_of(chat.encode(1))
    pairs = zip(said, token_ids_of(replace(chat, messages=[other]).encode(1)), strict=False)
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for end in range(num_same, len(prompt) - 1, -1):
        if prompt and said[end - len(prompt) : end] == prompt:
            return said[:end]
    raise SftDataError(
        f"{chat.where}: message 0 is the assistant's, and the chat template does not say where its "
        "text begins; put a message of the user before it, or leave it out"
    )


def token_ids_of(encoded: Any) -> list[int]:
    """Return the tokens that a tokenizer made."""
    # Any: a BatchEncoding, whose stubs do not say what its values are
    return [int(token) for token in encoded["input_ids"]]


def joined(parts: Sequence[tuple[list[int], bool]]) -> SftExample:
    """Return an example of tokens that are trained, or not, part after part."""
    return SftExample(
        token_ids=np.asarray([token for ids, _ in parts for token in ids], dtype=np.int32),
        trainable=np.asarray([trained for ids, trained in parts for _ in ids], dtype=np.bool_),
    )
