"""What a vLLM engine that somebody else made has to be set to, so that its samples are right."""

from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from cosmos_rollout.engines.vllm_arguments import ALWAYS
from cosmos_rollout.errors import EngineSettingsError

_LOGPROBS_MODE = ALWAYS["logprobs_mode"]


def check_settings(llm: AsyncLLM) -> None:
    """Refuse an engine whose samples would not be what they say.

    Raises:
        EngineSettingsError: naming the setting, and what it has to be.
    """
    mode = llm.model_config.logprobs_mode
    if mode != _LOGPROBS_MODE:
        raise EngineSettingsError(
            f"the engine was made with logprobs_mode={mode!r}, which does not give the "
            "log-probability that a token was drawn with under every sampling; make it with "
            f"AsyncEngineArgs(..., logprobs_mode={_LOGPROBS_MODE!r})"
        )
    if current_platform.is_cpu() and llm.vllm_config.scheduler_config.enable_chunked_prefill:
        raise EngineSettingsError(
            "on a CPU, vLLM ends when it computes a prompt in parts and samples by a seed; make "
            "the engine with AsyncEngineArgs(..., enable_chunked_prefill=False)"
        )
