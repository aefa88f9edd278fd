"""The scripted engine: answers given by a function, at a pace of choice. For tests and benchmarks.

It goes through the same queues, pauses, versions and weight swaps as an engine with a model, so
what is tested with it holds for the others.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cosmos_rollout.engine import GenerationRequest, SleepPolicy, StagedWeights
from cosmos_rollout.engines.in_process import DecodedToken, InProcessEngine
from cosmos_rollout.engines.setup import EngineSetup

Script = Callable[[GenerationRequest, int, int], tuple[int, float]]
"""``script(request, position, version)`` gives the token at that position and its log-prob."""


class ScriptDecoder:
    """A `Decoder` that reads its tokens from a script.

    Args:
        script: gives each token.
        version: weight version to begin with.
        context_length: most tokens of prompt and response.
        vocabulary_size: token ids are below this.
        step_s: seconds that one step takes, whatever the number of requests.
    """

    def __init__(
        self,
        script: Script,
        *,
        version: int = 0,
        context_length: int = 4096,
        vocabulary_size: int = 256,
        step_s: float = 0.0,
    ) -> None:
        self._script = script
        self._version = version
        self._context_length = context_length
        self._vocabulary_size = vocabulary_size
        self._step_s = step_s
        self._positions: dict[str, tuple[GenerationRequest, int]] = {}

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response."""
        return self._context_length

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return self._vocabulary_size

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start these requests with the next step."""
        self._positions.update((request.request_id, (request, 0)) for request in requests)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests."""
        for request_id in request_ids:
            self._positions.pop(request_id, None)

    def step(self) -> Sequence[DecodedToken]:
        """Read one token for each request."""
        if self._step_s:
            time.sleep(self._step_s)
        tokens: list[DecodedToken] = []
        for request_id, (request, position) in self._positions.items():
            token_id, logprob = self._script(request, position, self._version)
            tokens.append(DecodedToken(request_id, token_id, logprob))
            self._positions[request_id] = (request, position + 1)
        return tokens

    def load(self, staged: StagedWeights) -> None:
        """Go on as this version; its tensors are not looked at."""
        self._version = staged.version

    def sleep(self, weights: SleepPolicy) -> None:
        """Nothing is held."""

    def wake(self) -> None:
        """Nothing is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionOnly:
    """`StagedWeights` without tensors: all that a script needs."""

    version: int
    tensors: Mapping[str, Any]  # empty; a script has none to type


class VersionSource:
    """A `WeightSource` for scripts: any version is there at once."""

    def stage(self, version: int, endpoints: Sequence[str]) -> StagedWeights:
        """Return the version that was asked for."""
        del endpoints
        return VersionOnly(version=version, tensors={})


def random_script(*, vocabulary_size: int = 256, mean_length: int = 16) -> Script:
    """Return a script of seeded random tokens; stop tokens come with probability 1/mean_length.

    Token and log-prob are a function of the request's prompt, its seed and the position alone;
    greedy requests ignore the seed. The log-prob is that of a uniform draw.
    """

    def script(request: GenerationRequest, position: int, version: int) -> tuple[int, float]:
        del version
        sampling = request.sampling
        seed = 0 if sampling.temperature == 0.0 else sampling.seed
        draw = random.Random(f"{request.prompt_token_ids}/{seed}/{position}")
        if sampling.stop_token_ids and draw.random() < 1.0 / mean_length:
            return sampling.stop_token_ids[0], -1.0
        return draw.randrange(vocabulary_size), -1.0

    return script


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedConfig:
    """Settings of the scripted engine.

    Attributes:
        kind: selects this engine.
        vocabulary_size: tokens are drawn from 0 to this.
        mean_length: responses end with a stop token after this many tokens on average.
        context_length: most tokens of prompt and response.
        step_s: seconds per token, for all requests at once.
        max_running: requests decoded at once.
    """

    kind: Literal["scripted"] = "scripted"
    vocabulary_size: int = 256
    mean_length: int = 16
    context_length: int = 4096
    step_s: float = 0.0
    max_running: int = 64

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: naming the setting.
        """
        for name in ("vocabulary_size", "mean_length", "context_length", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} has to be 1 or more, found {getattr(self, name)}")
        if not 0.0 <= self.step_s < math.inf:
            raise ValueError(f"step_s has to be 0 or more and finite, found {self.step_s}")

    async def build(self, setup: EngineSetup) -> InProcessEngine:
        """Start an engine that answers with `random_script`."""
        script = random_script(vocabulary_size=self.vocabulary_size, mean_length=self.mean_length)
        decoder = ScriptDecoder(
            script,
            version=setup.version,
            context_length=self.context_length,
            vocabulary_size=self.vocabulary_size,
            step_s=self.step_s,
        )
        source = setup.weight_source or VersionSource()
        return InProcessEngine(
            decoder, version=setup.version, source=source, max_running=self.max_running
        )
