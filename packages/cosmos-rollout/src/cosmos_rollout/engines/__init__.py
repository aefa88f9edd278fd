"""The engines, each behind its settings: vLLM, SGLang, transformers, scripted, an endpoint."""

from cosmos_rollout.engines.endpoint import EndpointConfig, EndpointEngine
from cosmos_rollout.engines.in_process import DecodedToken, Decoder, InProcessEngine
from cosmos_rollout.engines.prompt_scores import answer_scores
from cosmos_rollout.engines.scripted import (
    Script,
    ScriptDecoder,
    ScriptedConfig,
    VersionSource,
    random_script,
)
from cosmos_rollout.engines.setup import EngineSetup, WeightClientFactory
from cosmos_rollout.engines.sglang_config import SGLangConfig
from cosmos_rollout.engines.transformers_config import TransformersConfig
from cosmos_rollout.engines.vllm_arguments import longest_context
from cosmos_rollout.engines.vllm_config import (
    GPU_MEMORY_SHARE,
    VLLMConfig,
    attach_vllm,
    cpu_environment,
)

EngineConfig = VLLMConfig | TransformersConfig | ScriptedConfig | EndpointConfig | SGLangConfig

__all__ = [
    "GPU_MEMORY_SHARE",
    "DecodedToken",
    "Decoder",
    "EndpointConfig",
    "EndpointEngine",
    "EngineConfig",
    "EngineSetup",
    "InProcessEngine",
    "SGLangConfig",
    "Script",
    "ScriptDecoder",
    "ScriptedConfig",
    "TransformersConfig",
    "VLLMConfig",
    "VersionSource",
    "WeightClientFactory",
    "answer_scores",
    "attach_vllm",
    "cpu_environment",
    "longest_context",
    "random_script",
]
