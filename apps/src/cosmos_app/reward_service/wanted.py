"""Samples are scored as long as somebody waits for it, and the service does not end."""

import asyncio

from fastapi import Request

from cosmos_rollout import Outcome, RewardInput, RewardPool, RewardPoolClosedError


class Wanted:
    """Scores samples of clients.

    A client that has waited for long enough asks about its next sample: were the first one scored
    all the same, a service that is behind would be behind for ever.

    Attributes:
        num_open: samples that are being scored, or wait for it.
    """

    def __init__(self, pool: RewardPool) -> None:
        """Nobody has asked yet.

        Args:
            pool: computes rewards; a worker is killed whose sample nobody waits for any more.
        """
        self.num_open = 0
        self._pool = pool

    async def score(self, sample: RewardInput, request: Request) -> Outcome | None:
        """Return a sample's rewards; ``None`` if its client has left, or the pool was closed.

        Args:
            sample: what is scored.
            request: that asks for it; its body was read.
        """
        scoring = asyncio.ensure_future(self._pool.score(sample))
        leaving = asyncio.ensure_future(_left(request))
        leaving.add_done_callback(lambda _: scoring.cancel())
        self.num_open += 1
        try:
            return await scoring
        except RewardPoolClosedError:
            return None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            return None
        finally:
            self.num_open -= 1
            leaving.cancel()


async def _left(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_cancelled() -> bool:
    """Return whether it is the task that runs which was cancelled, and not what it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
