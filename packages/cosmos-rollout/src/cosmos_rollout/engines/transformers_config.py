"""Settings of the transformers engine; importing them does not import torch."""

from dataclasses import dataclass
from typing import Literal

from cosmos_rollout.engine import KvPolicy, RolloutEngine, TokenScorer
from cosmos_rollout.engines.setup import EngineSetup


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
            EngineStartError: if there is no such model.
        """
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
            EngineStartError: if there is no such model.
        """
        del top_k
        from cosmos_rollout.engines.transformers_engine import start_transformers_scorer

        return await start_transformers_scorer(
            setup, dtype=self.dtype, device=self.device, context_length=self.context_length
        )
