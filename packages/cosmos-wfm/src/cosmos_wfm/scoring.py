"""A scorer that cannot end a run: what raises, hangs or gives no number costs its samples' rewards.

micro-batch ─► scorer ── numbers ─► Scores
                 └ raised, late, no numbers: each sample alone ── NaN if that fails ─► Scores

Scorers are called one at a time, in a thread of their own that is left to itself where it hangs:
nothing can end it from outside.
"""

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.errors import RewardError, RewardTimeoutError

Scorer = Callable[[Tensor, Sequence[str]], "Future[list[float]] | Sequence[float]"]
"""From pixels [B, 3, (F,) H, W] in [-1, 1] and prompts to a score of each, now or later.

One that is not finite is none. It may raise: then each sample is asked for by itself.
"""

NONE = math.nan
"""The reward of a sample that has none."""
PATIENCE_S = 60.0
CALLS_IN_ALL = 3.0
"""Deadlines that the rewards of a micro-batch have at most: one together, two one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What the samples of a micro-batch earned.

    Attributes:
        values: of each; NaN of one that has no reward.
        problems: why not, each once.
    """

    values: tuple[float, ...]
    problems: tuple[str, ...] = ()


class GuardedScorer:
    """Asks a scorer; the future that it gives has no exception and always ends.

    A call that gives numbers is waited for, so that nothing else computes meanwhile; one that gives
    a future, or takes long, is not.
    """

    def __init__(
        self, scorer: Scorer, deadline_s: float, *, patience_s: float = PATIENCE_S
    ) -> None:
        """Get ready.

        Args:
            scorer: what is asked.
            deadline_s: for its numbers; where they are late, or it raises, the samples one by one
                have twice that, all together.
            patience_s: how long a call is waited for before it is left to end later.
        """
        self._scorer = scorer
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._turn = threading.Lock()
        self._caller = _Caller()
        weakref.finalize(self, _Caller.end, self._caller)

    def __call__(
        self, media: Float[Tensor, "B ..."], prompts: Sequence[str], *, waits: bool = True
    ) -> "Future[Scores]":
        """Return what samples will have earned; one that is cancelled is not asked for any more.

        Args:
            media: what the scorer takes.
            prompts: of each sample.
            waits: whether this returns only when the scorer has, if it is quick enough.
        """
        asked = _Asked(media, prompts)
        threading.Thread(target=self._settle, args=(asked,), daemon=True).start()
        if waits:
            asked.returned.wait(self._patience_s)
        return asked.answer

    def _settle(self, asked: "_Asked") -> None:
        """Find the scores of a micro-batch, in a thread of its own."""
        media, prompts = asked.media, asked.prompts
        end = time.monotonic() + CALLS_IN_ALL * self._deadline_s
        given: Sequence[float] | Future[list[float]]
        try:
            with self._turn:
                if not asked.answer.set_running_or_notify_cancel():
                    return
                given = self._call(media, prompts, self._deadline_s)
            if isinstance(given, Future) and not given.done():
                asked.returned.set()
            values = _numbers(_there(given, self._deadline_s), len(prompts))
        except Exception as error:  # noqa: BLE001 - of somebody else's function
            scores = self._one_by_one(media, prompts, end, error)
        else:
            scores = _scores(values, prompts)
        finally:
            asked.returned.set()
        asked.answer.set_result(scores)

    def _one_by_one(
        self, media: Tensor, prompts: Sequence[str], end: float, error: Exception
    ) -> Scores:
        """Ask for each sample by itself, where a failure may be that of another one."""
        if len(prompts) == 1 or isinstance(error, RewardTimeoutError):
            return Scores(values=(NONE,) * len(prompts), problems=(_said(error),))
        given: list[Sequence[float] | Future[list[float]] | Exception] = []
        for row, prompt in enumerate(prompts):
            within_s = min(self._deadline_s, end - time.monotonic())
            try:
                with self._turn:
                    given.append(self._call(media[row : row + 1], [prompt], within_s))
            except Exception as failure:  # noqa: BLE001 - of somebody else's function
                given.append(failure)
        parts = [
            _one(each, prompt, min(self._deadline_s, end - time.monotonic()))
            for each, prompt in zip(given, prompts, strict=True)
        ]
        problems = dict.fromkeys(problem for part in parts for problem in part.problems)
        return Scores(values=tuple(part.values[0] for part in parts), problems=tuple(problems))

    def _call(
        self, media: Tensor, prompts: Sequence[str], within_s: float
    ) -> "Sequence[float] | Future[list[float]]":
        """Call the scorer; what it raises is raised.

        Raises:
            RewardError: if it does not return in time; the next call has another thread. Or if
                there is nothing to see, of which a scorer of 8-bit pictures would make black ones.
        """
        if within_s <= 0:
            raise RewardError("no time was left to ask for this sample")
        if media.device.type != "meta" and not bool(media.isfinite().all()):
            raise RewardError(f"what was drawn of {str(prompts[0])!r} is not finite")
        called = self._caller.call(partial(_call_scorer, self._scorer, media, prompts))
        try:
            return called.result(within_s)
        except TimeoutError:
            if called.done():
                raise
        self._caller.end()
        self._caller = _Caller()
        weakref.finalize(self, _Caller.end, self._caller)
        raise RewardError(f"the scorer did not return in {within_s:.3g} s")


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A micro-batch that is asked for."""

    media: Tensor
    prompts: Sequence[str]
    answer: "Future[Scores]" = field(default_factory=Future)
    returned: threading.Event = field(default_factory=threading.Event)


class _Caller:
    """A thread that calls one function after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=_call_all, args=(self._calls,), daemon=True).start()

    def call(self, function: Callable[[], object]) -> "Future[Sequence[float]]":
        called: Future[object] = Future()
        self._calls.put((function, called))
        return cast("Future[Sequence[float]]", called)

    def end(self) -> None:
        """Have the thread end, once it has returned."""
        self._calls.put(None)


def _call_all(
    calls: "queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None]",
) -> None:
    while (call := calls.get()) is not None:
        function, called = call
        try:
            called.set_result(function())
        except Exception as error:  # noqa: BLE001 - whatever somebody else's function raises
            called.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - it would end this thread alone
            called.set_exception(RewardError(_said(error)))
        del call, function, called


def _call_scorer(scorer: Scorer, media: Tensor, prompts: Sequence[str]) -> object:
    """Call a scorer as the thread that draws would: without gradient, on the samples' device."""
    device: AbstractContextManager[object] = nullcontext()
    if media.device.type not in ("cpu", "meta"):
        device = torch.get_device_module(media.device).device(media.device)
    with torch.no_grad(), device:
        return scorer(media, prompts)


def _there(given: "Sequence[float] | Future[list[float]]", within_s: float) -> object:
    if not isinstance(given, Future):
        return given
    try:
        return given.result(max(0.0, within_s))
    except TimeoutError as error:
        if given.done():
            raise
        raise RewardError(f"no rewards in {within_s:.3g} s") from error


def _one(
    given: "Sequence[float] | Future[list[float]] | Exception", prompt: str, within_s: float
) -> Scores:
    if isinstance(given, Exception):
        return Scores(values=(NONE,), problems=(_said(given),))
    try:
        return _scores(_numbers(_there(given, within_s), 1), [prompt])
    except Exception as error:  # noqa: BLE001 - of somebody else's function
        return Scores(values=(NONE,), problems=(_said(error),))


def _numbers(given: object, num: int) -> list[float]:
    """Return scores as numbers.

    Raises:
        RewardError: if they are not one number for each sample.
    """
    try:
        scores = [float(each) for each in cast("Sequence[float]", given)]
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"a {type(given).__name__} for {num} samples; a scorer returns a number for each, or a "
            f"Future of them ({error})"
        ) from error
    if len(scores) != num:
        raise RewardError(f"{len(scores)} numbers for {num} samples")
    return scores


def _scores(values: Sequence[float], prompts: Sequence[str]) -> Scores:
    """Return scores, of which those that are not finite are none."""
    problems = {
        f"{value} for a sample of {str(prompt)!r}; a reward is finite": None
        for value, prompt in zip(values, prompts, strict=True)
        if not math.isfinite(value)
    }
    kept = tuple(value if math.isfinite(value) else NONE for value in values)
    return Scores(values=kept, problems=tuple(problems))


def _said(error: BaseException) -> str:
    own = isinstance(error, RewardError)
    return str(error) if own else f"{type(error).__name__}: {error}"
