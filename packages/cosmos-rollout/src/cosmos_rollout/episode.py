"""An episode: all the tokens of one sample, whether the model said one thing or many.

What the model saw is what it is trained on: the tokens of every turn stand here as they were given
to the engine and as it gave them back, in order, and no text is turned into tokens twice. A picture
or video is one mark in what is given, and stands here as the tokens that the engine made of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cosmos_core.trajectory import UNSAMPLED, FinishReason, VersionSpan
from cosmos_rollout.engine import GeneratedSample, GenerationRequest, Shown

Message = Mapping[str, Any]
"""A turn as a chat template takes it: ``role`` and ``content``, tool calls and the like."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode:
    """The tokens of one sample, T in all, prompt included.

    A prompt of 3, a reply of 2, an observation of 2, a last reply of 1::

        token_ids  [ 7  8  9 |  4  2 |  6  8 |  2 ]
        trainable  [ 0  0  0 |  1  1 |  0  0 |  1 ]
        versions   (UNSAMPLED, 3) (5, 2) (UNSAMPLED, 2) (6, 1)

    Attributes:
        num_prompt_tokens: how many of the tokens were there before the model said anything.
        token_ids: int32[T].
        logprobs: float32[T]; 0 where not trainable.
        trainable: bool[T], true for the tokens that the model sampled.
        versions: run-length coded weight version of each token; lengths sum to T.
        finish_reason: "stop", or "length" if a limit of tokens ended it.
        num_turns: how often the model spoke.
        response: what it said last, special tokens left out.
        messages: the conversation; empty without an environment.
        rewards: what the environment itself gave.
        metrics: what it measured besides.
        images: references of the pictures and videos among the tokens, in order.
        marked_token_ids: the tokens with one mark for each of these, if there are any.
    """

    num_prompt_tokens: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    trainable: npt.NDArray[np.bool_]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    num_turns: int
    response: str
    messages: tuple[Message, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    images: tuple[str, ...] = ()
    marked_token_ids: tuple[int, ...] = ()

    @property
    def shown(self) -> Shown | None:
        """The pictures and videos among the tokens, for whoever looks at them again."""
        if not self.images:
            return None
        return Shown(marked_token_ids=self.marked_token_ids, images=self.images)

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the model sampled."""
        return int(np.count_nonzero(self.trainable))


class Tape:
    """Records the tokens of an episode as they come."""

    def __init__(self) -> None:
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._trainable: list[npt.NDArray[np.bool_]] = []
        self._versions: list[VersionSpan] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Everything recorded so far."""
        return tuple(token for part in self._tokens for token in part.tolist())

    @property
    def num_tokens(self) -> int:
        """How much was recorded so far."""
        return sum(map(len, self._tokens))

    def given(self, token_ids: Sequence[int]) -> None:
        """Record tokens that the model was given."""
        if token_ids:
            count = len(token_ids)
            self._tokens.append(np.array(token_ids, dtype=np.int32))
            self._logprobs.append(np.zeros(count, dtype=np.float32))
            self._trainable.append(np.zeros(count, dtype=np.bool_))
            self._extend([VersionSpan(UNSAMPLED, count)])

    def sampled(self, sample: GeneratedSample) -> None:
        """Record tokens that the model said."""
        self._tokens.append(sample.token_ids)
        self._logprobs.append(sample.logprobs)
        self._trainable.append(np.ones(len(sample.token_ids), dtype=np.bool_))
        self._extend(sample.versions)

    def arrays(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Return token ids, log-probs and the trainable mask of everything."""
        return (
            np.concatenate(self._tokens),
            np.concatenate(self._logprobs),
            np.concatenate(self._trainable),
        )

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Run-length coded versions of everything."""
        return tuple(self._versions)

    def _extend(self, spans: Sequence[VersionSpan]) -> None:
        for span in spans:
            if self._versions and self._versions[-1].version == span.version:
                span = VersionSpan(span.version, span.length + self._versions.pop().length)
            self._versions.append(span)


def single_turn(request: GenerationRequest, sample: GeneratedSample, response: str) -> Episode:
    """Return the episode of one prompt and one reply."""
    prompt = sample.prompt_token_ids or request.prompt_token_ids
    tape = Tape()
    tape.given(prompt)
    tape.sampled(sample)
    token_ids, logprobs, trainable = tape.arrays()
    marked = request.prompt_token_ids + tuple(sample.token_ids.tolist()) if request.images else ()
    return Episode(
        num_prompt_tokens=len(prompt),
        token_ids=token_ids,
        logprobs=logprobs,
        trainable=trainable,
        versions=tape.versions,
        finish_reason=sample.finish_reason,
        num_turns=1,
        response=response,
        images=request.images,
        marked_token_ids=marked,
    )
