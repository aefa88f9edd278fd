"""What the one who starts an engine hands to it, beside its settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_rollout.engine import KvPolicy, WeightClient, WeightSource
from cosmos_rollout.errors import EngineSettingsError

# The first argument is vLLM's AsyncLLM, which this module must not import.
WeightClientFactory = Callable[[Any, KvPolicy], WeightClient]
"""``factory(async_llm, kv)``: ``kv`` says whether a swap keeps the KV cache or recomputes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """What an engine's `build` needs to know.

    Attributes:
        model_path: Hugging Face directory of the weights to begin with; None for an engine whose
            model is somebody else's, or a script.
        version: weight version they are.
        weight_client: makes the client that moves weights into vLLM's workers.
        weight_source: gives weights to an engine of this process.
        engine_arguments: what the weight client needs vLLM to be started with, by vLLM's names.
        can_sleep: whether it will be asked to give up its device for a while.
        may_fork: whether vLLM's processes may be forked from this one without GPUs too, where vLLM
            starts new ones that import for 12 CPU seconds. For a process that has imported vLLM
            and not computed anything; with GPUs vLLM forks from any that has not used one.
    """

    model_path: Path | None = None
    version: int = 0
    weight_client: WeightClientFactory | None = None
    weight_source: WeightSource | None = None
    engine_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    can_sleep: bool = False
    may_fork: bool = False

    @property
    def model(self) -> Path:
        """The directory of the weights, for an engine that loads them.

        Raises:
            EngineSettingsError: if none was given.
        """
        if self.model_path is None:
            raise EngineSettingsError(
                "this engine loads a model, and was told of none; give "
                "EngineSetup(model_path=...), a Hugging Face model directory"
            )
        return self.model_path
