"""A trajectory: the tokens of one sample, how they were sampled, and what they earned.

One and many turns, language and diffusion, are the same type: a sequence of T steps of which some
are trained on. It lives on the host, in numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]
UNSAMPLED = -1


class VersionSpan(NamedTuple):
    """``length`` consecutive steps sampled by weight ``version`` (``UNSAMPLED``: by nobody)."""

    version: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One sample of a group, T steps long, prompt included.

    Attributes:
        prompt_id: identity of the prompt in its data set.
        group: key of the issued group, ``str(GroupId)``.
        sibling: position of the sample in its group.
        attempt: which attempt at the group produced it.
        token_ids: int32[T], prompt and response as the model saw them.
        logprobs: float32[T], log-probability under the behaviour policy; 0 where not trainable.
        trainable: bool[T], true for the tokens the model sampled.
        versions: run-length coded weight version of each step; lengths sum to T.
        rewards: each named reward.
        reward: their weighted total.
        finish_reason: why sampling ended.
        metrics: anything worth averaging over samples.
    """

    prompt_id: str
    group: str
    sibling: int
    attempt: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    trainable: npt.NDArray[np.bool_]
    versions: tuple[VersionSpan, ...]
    rewards: Mapping[str, float]
    reward: float
    finish_reason: FinishReason
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
