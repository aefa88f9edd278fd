"""A tokenizer whose text is its tokens, for models without one."""

from collections.abc import Mapping, Sequence


class Numbers:
    """A tokenizer of numbers separated by blanks."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str:
        return conversation[-1]["content"]
