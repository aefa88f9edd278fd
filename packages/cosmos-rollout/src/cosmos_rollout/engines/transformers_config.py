"""Settings of the transformers engine; importing them does not import torch."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

from cosmos_rollout.engine import KvPolicy, RolloutEngine, TokenScorer
from cosmos_rollout.engines.setup import EngineSetup
from cosmos_rollout.errors import EngineStartError


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersConfig:
    """Settings of the transformers engine, the reference.

    Attributes:
        kind: selects this engine.
        dtype: of weights and computation.
        device: "cpu" or "cuda".
        kv: whether requests in flight keep their keys and values when weights change.
        context_length: most tokens of prompt and response; the model's own limit if 0.
        max_running: requests decoded at once.
    """

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str = "cpu"
    kv: KvPolicy = "keep"
    context_length: int = 0
    max_running: int = 64

    async def build(self, setup: EngineSetup) -> RolloutEngine:
        """Load the model and start the engine.

        Raises:
            EngineStartError: if there is no such model, or no torch.
        """
        with _naming_what_is_missing(setup):
            from cosmos_rollout.engines.transformers_engine import start_transformers_engine

        return await start_transformers_engine(
            setup,
            dtype=self.dtype,
            device=self.device,
            kv=self.kv,
            context_length=self.context_length,
            max_running=self.max_running,
        )

    async def build_scorer(self, setup: EngineSetup, *, top_k: int = 0) -> TokenScorer:
        """Load the model to score tokens that are given; ``top_k`` may be anything.

        Raises:
            EngineStartError: if there is no such model, or no torch.
        """
        del top_k
        with _naming_what_is_missing(setup):
            from cosmos_rollout.engines.transformers_engine import start_transformers_scorer

        return await start_transformers_scorer(
            setup, dtype=self.dtype, device=self.device, context_length=self.context_length
        )


@contextlib.contextmanager
def _naming_what_is_missing(setup: EngineSetup) -> Generator[None]:
    """Say what to install, where the engine cannot be imported inside the block.

    Raises:
        EngineSettingsError: before it, if there is no model that it could load.
    """
    model = setup.model
    try:
        yield
    except ImportError as error:
        raise EngineStartError(
            f"{model}: the transformers engine cannot be imported; install what it needs with "
            f"pip install 'cosmos-rollout[torch]' ({error})"
        ) from error
