"""What a reward service was asked, is working on, and has answered.

enqueue ─► queue of each reward asked for ─► its process ─► answer, kept for a while ─► pull
   │ full: refused, nothing is dropped           │ died: once more, then an error
   └ the same bytes again: the same ticket
"""

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cosmos_app.errors import RunError
from cosmos_app.wfm.reward_service.processes import ScoringProcess, ScoringProcessError
from cosmos_wfm import RewardRequest

_ATTEMPTS = 2


class QueueFullError(RunError):
    """Raised when a reward has as many requests waiting as it may have."""


class UnknownRequestError(RunError):
    """Raised when nothing is known of a request, or it did not ask for that reward."""


@dataclass(slots=True)
class _Request:
    body: bytes
    info: Mapping[str, Any]
    answers: dict[str, "asyncio.Future[dict[str, Any]]"]
    ended_s: float | None = None

    @property
    def failed(self) -> bool:
        return any(f.done() and "error" in f.result() for f in self.answers.values())


@dataclass(slots=True)
class Figures:
    """Counts since the start, by reward.

    Attributes:
        samples: that were scored.
        failed: requests that ended in an error.
        refused: requests, of any reward, for which there was no room.
        seconds: spent on scoring.
    """

    samples: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    refused: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])


class RewardQueue:
    """Requests and their answers; everything happens in one event loop.

    Attributes:
        processes: by the name of their reward.
        figures: for metrics.
    """

    def __init__(
        self,
        processes: Sequence[ScoringProcess],
        *,
        capacity: int,
        keep_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know nothing yet.

        Args:
            processes: one for each reward.
            capacity: requests that may wait for a reward, the one in hand included.
            keep_s: how long answers are kept after the last one of a request.
            clock: seconds.
        """
        self.processes = {process.name: process for process in processes}
        self.figures = Figures()
        self._capacity = capacity
        self._keep_s = keep_s
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._waiting = {name: asyncio.Queue[str]() for name in self.processes}
        self._num_open: Counter[str] = Counter()

    def num_open(self, name: str) -> int:
        """Return how many requests wait for a reward, the one in hand included."""
        return self._num_open[name]

    def enqueue(self, body: bytes, request: RewardRequest) -> str:
        """Take a request in, and return its ticket; the same bytes have the same ticket.

        Raises:
            UnknownRequestError: if it asks for a reward that is not served.
            QueueFullError: if one of its rewards has no room; nothing is taken in.
        """
        self._forget()
        unknown = sorted(request.rewards.keys() - self.processes.keys())
        if unknown:
            raise UnknownRequestError(
                f"{unknown[0]} is not served here; there are {', '.join(sorted(self.processes))}"
            )
        ticket = hashlib.sha256(body).hexdigest()[:32]
        known = self._requests.get(ticket)
        if known is not None and not known.failed:
            return ticket
        full = [name for name in request.rewards if self._num_open[name] >= self._capacity]
        if full:
            self.figures.refused += 1
            raise QueueFullError(f"{full[0]} has {self._capacity} requests waiting")
        answers = {name: asyncio.Future[dict[str, Any]]() for name in request.rewards}
        info = {"media_type": request.media_type, "shape": list(request.media.shape)}
        self._requests[ticket] = _Request(body, info, answers)
        for name in request.rewards:
            self._num_open[name] += 1
            self._waiting[name].put_nowait(ticket)
        return ticket

    async def answer(self, ticket: str, name: str, patience_s: float) -> dict[str, Any] | None:
        """Return the answer of a reward to a request; ``None`` if there is none in that time.

        Args:
            ticket: of the request.
            name: of the reward; empty for the only one that was asked for.
            patience_s: how long to wait for it.

        Raises:
            UnknownRequestError: if there is no such request, or it did not ask for that.
        """
        self._forget()
        request = self._requests.get(ticket)
        if request is None:
            raise UnknownRequestError(f"nothing is known of a request {ticket!r}")
        name = name or (next(iter(request.answers)) if len(request.answers) == 1 else "")
        if name not in request.answers:
            raise UnknownRequestError(
                f"request {ticket} asked for {', '.join(request.answers)}, not for {name!r}"
            )
        future = request.answers[name]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), patience_s)
        if not future.done():
            return None
        return {**future.result(), "type": name, "input_info": request.info}

    async def work(self) -> None:
        """Have the processes score until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for name in self.processes:
                    group.create_task(self._serve(name))
        finally:
            for process in self.processes.values():
                await process.close()

    async def _serve(self, name: str) -> None:
        while True:
            ticket = await self._waiting[name].get()
            request = self._requests.get(ticket)
            if request is None or request.answers[name].done():
                self._num_open[name] -= 1  # it was enqueued again, and answered by that
                continue
            answer = await self._score(name, request.body)
            self._num_open[name] -= 1
            self._count(name, request, answer)
            request.answers[name].set_result(answer)
            if all(future.done() for future in request.answers.values()):
                request.body, request.ended_s = b"", self._clock()

    async def _score(self, name: str, body: bytes) -> dict[str, Any]:
        """Ask a reward's process; one that dies is started again for a second try."""
        problem = ""
        for _ in range(_ATTEMPTS):
            try:
                return await self.processes[name].score(body)
            except ScoringProcessError as error:
                problem = str(error)
        return {"error": f"{problem}; it was tried {_ATTEMPTS} times"}

    def _count(self, name: str, request: _Request, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            self.figures.failed[name] += 1
            return
        self.figures.samples[name] += request.info["shape"][0]
        seconds = self.figures.seconds
        seconds[name] = seconds.get(name, 0.0) + answer["duration"] + answer["decoded_duration"]

    def _forget(self) -> None:
        """Drop answers that nobody has asked for in a long time."""
        oldest = self._clock() - self._keep_s
        for ticket, request in list(self._requests.items()):
            if request.ended_s is not None and request.ended_s < oldest:
                del self._requests[ticket]
