"""An engine as those who play groups see it, with its requests and their episodes counted."""

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager

from cosmos_rollout.engine import AnsweringEngine, GeneratedSample, GenerationRequest


class MeteredEngine:
    """Passes requests on to an engine and says at once when their number changes.

    Args:
        engine: what answers.
        changed: called after `num_requests` or `num_episodes` went up or down.
    """

    def __init__(self, engine: AnsweringEngine, changed: Callable[[], None]) -> None:
        self._engine = engine
        self._changed = changed
        self.num_requests = 0
        self.num_episodes = 0

    @property
    def context_length(self) -> int:
        """The engine's."""
        return self._engine.context_length

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[GeneratedSample, None]:
        """Yield the engine's samples; a request counts until its sample is there or it is given up.

        Raises:
            RolloutError: what the engine raises.
        """
        left = len(requests)
        self._add(left)
        try:
            async with aclosing(self._engine.generate(requests)) as samples:
                async for sample in samples:
                    left -= 1
                    self._add(-1)
                    yield sample
        finally:
            self._add(-left)

    @contextmanager
    def episode(self) -> Generator[None]:
        """Count an episode while it is played, by the engine or by its environment."""
        self.num_episodes += 1
        self._changed()
        try:
            yield
        finally:
            self.num_episodes -= 1
            self._changed()

    def _add(self, requests: int) -> None:
        self.num_requests += requests
        if requests:
            self._changed()
