"""The engines: vLLM, transformers (reference) and scripted (tests), each behind its settings."""

from cosmos_rollout.engines.in_process import DecodedToken, Decoder, InProcessEngine
from cosmos_rollout.engines.scripted import (
    Script,
    ScriptDecoder,
    ScriptedConfig,
    VersionSource,
    random_script,
)
from cosmos_rollout.engines.setup import EngineSetup, WeightClientFactory
from cosmos_rollout.engines.transformers_config import TransformersConfig

__all__ = [
    "DecodedToken",
    "Decoder",
    "EngineSetup",
    "InProcessEngine",
    "Script",
    "ScriptDecoder",
    "ScriptedConfig",
    "TransformersConfig",
    "VersionSource",
    "WeightClientFactory",
    "random_script",
]
