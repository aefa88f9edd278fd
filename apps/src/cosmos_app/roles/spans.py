"""What the replicas of a run did when, in the format that simulations have: ``spans`` of a run.

A file for each replica, bounded; times are those of its machine's monotonic clock.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from cosmos_app.bounded_files import append_bounded
from cosmos_core.activity import ActivityMeter
from cosmos_core.messages import Role, Train
from cosmos_core.simulation import Activity, Diary, LogRecord, encode_log, step_taken

SPANS = "spans"
_MOST_BYTES = 64 << 20
_APART: Mapping[str, Activity] = {
    "saving": "checkpoint",
    "evaluating": "eval",
    "publishing": "push_exposed",
}
"""What a policy does between its steps, besides waiting."""


def open_diary(run: Path, role: Role, replica: str) -> Diary:
    """Begin what a replica writes into a run's directory; a full disk costs only what it says."""
    (run / SPANS).mkdir(exist_ok=True)
    write = partial(_append, run / SPANS / f"{replica}.jsonl")
    return Diary(role, replica, write, start_s=time.monotonic())


def _append(path: Path, records: Sequence[LogRecord]) -> None:
    try:
        append_bounded(path, encode_log(records), most_bytes=_MOST_BYTES)
    except OSError:
        return  # nothing is recovered from it


class UpdateClock:
    """Seconds that this process's optimizers take for their updates."""

    def __init__(self) -> None:
        self._since_s = self._seconds = 0.0
        self._hooks = (
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        )

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, optimizer: Optimizer, *_: object) -> None:
        del optimizer
        self._since_s = time.monotonic()

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        del optimizer
        self._seconds += time.monotonic() - self._since_s


class PolicyTime:
    """Where the time of one rank of a policy replica goes: shares, spans, seconds of a step.

    Args:
        diary: of rank 0; none where the trainer keeps one itself, and for other ranks.
    """

    def __init__(self, diary: Diary | None) -> None:
        now = time.monotonic()
        self._meter = ActivityMeter(("waiting", "training", *_APART), now)
        self._diary = diary
        self._updates = UpdateClock()
        self._begun_s = self._ended_s = self._free_s = self._stepped_s = now
        self._apart_s = dict.fromkeys(_APART, 0.0)

    @property
    def is_busy(self) -> bool:
        """Whether a step is taken or weights are published: a rank that hangs costs the lease."""
        return self._meter.state in {"training", "publishing"}

    @property
    def idle_share(self) -> float:
        """Share of the time until now that was spent waiting."""
        return self._meter.shares(time.monotonic())["waiting"]

    @contextmanager
    def spent(
        self, state: Literal["training", "saving", "evaluating", "publishing"], version: int
    ) -> Generator[None]:
        """Account for the time inside the block."""
        begun_s = time.monotonic()
        self._meter.enter(state, begun_s)
        try:
            yield
        finally:
            ended_s = time.monotonic()
            self._meter.enter("waiting", ended_s)
            if state == "training":
                self._begun_s, self._ended_s = begun_s, ended_s
            else:
                self._apart_s[state] += ended_s - begun_s
                self._note("wait_data", begun_s, version)
                self._note(_APART[state], ended_s, version)
                self._free_s = ended_s

    def step(self, train: Train, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write down the step that was taken last; return what else is to be measured of it.

        ``wait_s`` is how long it waited for its samples, ``optim_s`` the update of ``train_s``,
        ``validate_s`` how much of the wait was for validations, ``save_s`` what checkpoints took
        since the step before; where the device's peak is known,
        ``mfu_fwd_bwd`` and ``mfu_wall_clock`` are the share of it in the passes alone, and since
        the end of the step before.
        """
        begun_s, ended_s = self._begun_s, self._ended_s
        optim_s, publish_s = self._updates.take(), metrics.get("publish_s", 0.0)
        wait_s = max(0.0, begun_s - self._free_s)
        validate_s = min(train.validated_s, wait_s)
        if validate_s:
            self._note("eval", self._free_s + validate_s, train.step)
        self._note("wait_data", begun_s, train.step)
        self._note("fwd_bwd", ended_s - publish_s - optim_s, train.step)
        self._note("optim", ended_s - publish_s, train.step)
        self._note("push_exposed", ended_s, train.step + 1)
        if self._diary is not None:
            self._diary.took(step_taken(train, begun_s, ended_s, with_keys=True))
        found = {"wait_s": wait_s, "optim_s": optim_s}
        found |= {"validate_s": validate_s} if validate_s else {}
        found |= {"save_s": saved_s} if (saved_s := self._apart_s["saving"]) else {}
        found |= _shares_of_peak(metrics, optim_s, ended_s - self._stepped_s)
        self._free_s = self._stepped_s = ended_s
        self._apart_s = dict.fromkeys(_APART, 0.0)
        return found

    def close(self) -> None:
        """Write down what is left."""
        self._updates.close()
        if self._diary is not None:
            self._diary.close()

    def _note(self, activity: Activity, end_s: float, version: int) -> None:
        if self._diary is not None:
            self._diary.note(activity, end_s, version=version)


def _shares_of_peak(
    metrics: Mapping[str, float], optim_s: float, wall_s: float
) -> dict[str, float]:
    """Return TRL's two MFUs: over the passes, and over all of the time between two steps' ends."""
    mfu, train_s = metrics.get("mfu", 0.0), metrics.get("train_s", 0.0)
    if not mfu or train_s <= optim_s or wall_s <= 0:
        return {}
    done = mfu * train_s
    return {"mfu_fwd_bwd": done / (train_s - optim_s), "mfu_wall_clock": done / wall_s}
