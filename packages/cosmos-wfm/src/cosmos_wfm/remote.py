"""Rollouts that come from processes of their own: what a run asks of them, and how they are set.

    rank      publish(0) ── take(0) ─ train ─ publish(1) ── take(1) ─ train ─ ...
                 │   ▲        ▲
            order│   │"free"  │samples with rewards
                 ▼   │        │
    replica     fetch weights, draw; ask for more while the rewards are computed

A micro-batch is drawn by whoever is free; those of a replica that is lost, or has said nothing for
``lease_s``, are given to others. One that hangs and wakes up goes on, and who comes first counts;
but one that the run has started itself is killed, and started again like one that died. One that
speaks and gets no further for ``stall_s`` ends by itself.
Step n is drawn with the weights of version n, or with ``max_lag`` of an older one: then replicas
draw while the trainer trains. Which sample has which noise depends on neither, so a lag of 0 gives
the numbers of a run in one process, whoever is lost on the way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cosmos_wfm.ranges import check_at_least, check_positive
from cosmos_wfm.rollouts import Rollout, StepParts


@dataclass(frozen=True, kw_only=True, slots=True)
class DisaggregatedConfig:
    """Rollouts in processes of their own.

    Attributes:
        replicas: processes that the run starts, on its own host, where ``start`` says so; any
            number may join from elsewhere by ``cosmos-app wfm rollout``, and go.
        max_lag: versions that a replica's weights may be older than the step it draws.
        start: whether the run starts any itself.
        restarts: how often each of them is started again after it died or hung; once more is an
            error.
        lease_s: a replica that was not heard of for as long is asked for nothing more until it is,
            and killed if the run has started it; replicas speak several times in it, whatever they
            compute.
        stall_s: longest that a replica may be at one part of its work: loading the model, a pass of
            the denoiser, decoding a micro-batch. One that is at it for longer ends, and says in its
            log where it was; one that the run has started and that has not connected by then is
            killed. Rewards have a deadline of their own.
        deadline_s: for drawing the samples of a step, beside the time that their rewards have of
            their own; more is an error.
        preload: replicas are forked from a process that has imported what they need, so that one
            that died is back at once; ``false`` starts each by itself.
    """

    replicas: int = 1
    max_lag: int = 0
    start: bool = True
    restarts: int = 3
    lease_s: float = 60.0
    stall_s: float = 900.0
    deadline_s: float = 1800.0
    preload: bool = True

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_at_least("disaggregated", self, replicas=1, max_lag=0, restarts=0)
        check_positive("disaggregated", self, "lease_s", "stall_s", "deadline_s")


class RemoteRollouts(Protocol):
    """Samples from elsewhere; every rank has one and calls alike, ``publish`` before ``take``."""

    def publish(self, version: int) -> None:
        """Let replicas fetch the weights as they are now."""
        ...

    def take(self, step: int) -> Sequence[Rollout]:
        """Return this rank's micro-batches of a step, in order, with their rewards."""
        ...


ConnectRollouts = Callable[[Mapping[str, Tensor], StepParts], RemoteRollouts]
"""From the weights that samples are drawn with, by the names that replicas have for them, and how a
step is divided, to what gives samples."""
