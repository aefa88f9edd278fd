"""Settings of the SGLang engine, a server process in a Python environment of its own."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cosmos_rollout.engine import KvPolicy, RolloutEngine
from cosmos_rollout.engines.setup import EngineSetup
from cosmos_rollout.engines.sglang_server import ServerUse

Setting = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangConfig:
    """Settings of the SGLang engine.

    Attributes:
        kind: selects this engine.
        interpreter: Python that has SGLang. It pins another PyTorch than vLLM, so that this is
            that of another environment as a rule; None: the one that runs this.
        device: of SGLang's, such as "cuda" or "cpu"; empty: what it finds.
        dtype: of weights and computation; "auto" takes the checkpoint's.
        context_length: most tokens of prompt and response, of which SGLang keeps a few for itself;
            the model's own limit if 0.
        max_running: requests decoded at once.
        kv: whether requests in flight keep their keys and values when weights change.
        memory_share: share of the device's memory for weights and cache; 0: SGLang's choice.
        tensor_parallel: GPUs that share each layer.
        start_s: longest that a start may take.
        request_s: seconds without a byte from the server after which a request has failed.
        shutdown_s: how long a clean end may take before processes are killed.
        extra: further options of ``sglang.launch_server``, with underscores; true is an option
            without a value. Seeds count with ``enable_deterministic_inference = true`` alone.
    """

    kind: Literal["sglang"] = "sglang"
    interpreter: Path | None = None
    device: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    context_length: int = 0
    max_running: int = 64
    kv: KvPolicy = "keep"
    memory_share: float = 0.0
    tensor_parallel: int = 1
    start_s: float = 600.0
    request_s: float = 600.0
    shutdown_s: float = 10.0
    extra: Mapping[str, Setting] = field(default_factory=dict[str, Setting])

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.tensor_parallel < 1:
            raise ValueError("max_running and tensor_parallel have to be 1 or more")
        if not 0.0 <= self.memory_share < 1.0:
            raise ValueError(f"memory_share has to be in [0, 1), found {self.memory_share}")
        limits_s = (self.start_s, self.request_s, self.shutdown_s)
        if not all(0.0 < limit_s < math.inf for limit_s in limits_s):
            raise ValueError("start_s, request_s and shutdown_s have to be positive and finite")

    async def build(self, setup: EngineSetup) -> RolloutEngine:
        """Start the server; takes a minute or so, during which the event loop stays free.

        Raises:
            EngineStartError: if SGLang is not there, or refuses the model or the settings.
        """
        from cosmos_rollout.engines.sglang_engine import start_sglang_engine

        use = ServerUse(
            interpreter=self.interpreter,
            arguments=self.arguments(setup),
            kv=self.kv,
            start_s=self.start_s,
            request_s=self.request_s,
            shutdown_s=self.shutdown_s,
        )
        return await start_sglang_engine(use, setup)

    def arguments(self, setup: EngineSetup) -> list[str]:
        """Return the options of SGLang's server, but for its address."""
        options: dict[str, Setting] = {
            "model_path": str(setup.model),
            "dtype": self.dtype,
            "max_running_requests": self.max_running,
            "tp_size": self.tensor_parallel,
            "weight_version": str(setup.version),
            "skip_tokenizer_init": True,  # token ids in and out; text never passes through
            "incremental_streaming_output": True,
            # a token that is under way while weights change would be told with the new version
            "disable_overlap_schedule": True,
            "log_level": "warning",
        }
        if self.device:
            options["device"] = self.device
        if self.context_length:
            options["context_length"] = self.context_length
        if self.memory_share:
            options["mem_fraction_static"] = self.memory_share
        words: list[str] = []
        for name, value in {**options, **self.extra}.items():
            if value is not False:
                words.append("--" + name.replace("_", "-"))
                words += [] if value is True else [str(value)]
        return words
