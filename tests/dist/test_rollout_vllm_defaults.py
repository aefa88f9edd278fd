"""What our default settings come to in vLLM itself, on a device that is not named."""

import pytest

pytest.importorskip("vllm")

from cosmos_rollout import VLLMConfig


@pytest.mark.slow
def test_by_default_vllm_compiles_and_shares_the_beginnings_of_prompts() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs(model="any", **VLLMConfig().engine_arguments())
    assert arguments.enforce_eager is False
    assert arguments.enable_prefix_caching is True
    eager = VLLMConfig(compiled="no").engine_arguments()
    assert AsyncEngineArgs(model="any", **eager).enforce_eager is True
