"""What a reward sees and says: `RewardInput` in, a number or a failure out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from cosmos_rollout.errors import RewardError


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """One sample as a reward function sees it; it travels to the worker process by pickle.

    Attributes:
        prompt: the prompt's text; of a conversation that of its last message.
        response: the response's text, special tokens left out.
        answer: the data row's ``answer``; None if it has none.
        fields: every other field of the data row.
        num_prompt_tokens: tokens of the prompt.
        num_response_tokens: tokens of the response, the stop token included.
        finish_reason: "stop" or "length".
        messages: the whole conversation, from prompt to response, if the row is one or there was
            an environment; ``response`` is what the model said last. A content with pictures or
            videos is a list of texts and marks.
        images: references of the pictures and videos that the model saw, in the order of the marks:
            `cosmos_core.videos.is_video` tells them apart, `cosmos_core.images.read_image` and
            `cosmos_core.videos.read_video` read them.
    """

    prompt: str
    response: str
    answer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # whatever the row holds
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    finish_reason: str = "stop"
    messages: tuple[Mapping[str, Any], ...] = ()
    images: tuple[str, ...] = ()


RewardFunction = Callable[[RewardInput], float]
"""``def reward(sample: RewardInput) -> float``; it may raise, hang or crash: see `RewardPool`."""

GroupRewardFunction = Callable[[Sequence[RewardInput]], Sequence[float]]
"""``def reward(samples: Sequence[RewardInput]) -> Sequence[float]``: one number a sibling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a sample has no reward: which reward failed, the class of the failure, its words.

    ``is_own`` says that the reward itself is at fault: it raised, or its number is not finite; not
    that it took too long, that its process died or that somebody it asks is away.
    """

    reward: str
    error: str
    message: str
    is_own: bool = False

    def __str__(self) -> str:
        """Return all three in one line."""
        return f"reward {self.reward}: {self.error}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Every reward of one sample, and their weighted total."""

    rewards: Mapping[str, float]
    total: float


Outcome = Scored | Failure


def answer_of(sample: RewardInput, name: str) -> str:
    """Return the data row's answer, which reward ``name`` cannot do without.

    Raises:
        RewardError: if the row has none, or one that is no text.
    """
    answer = cast("object", sample.answer)
    if answer is None:
        raise RewardError(f"reward {name} needs a field 'answer' in the data row")
    if not isinstance(answer, str):
        raise RewardError(
            f"reward {name}: the answer {answer!r} is of {type(answer).__name__}; it has to be a "
            f'text: "{answer}"'
        )
    return answer
