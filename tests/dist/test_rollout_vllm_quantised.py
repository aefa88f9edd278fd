"""Weights in few bits in an engine that is divided: each worker has to know how to compute."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

from engines_forked import engine_environment, may_fork  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402
from vllm_quantised import write_quantised  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    EngineSetup,
    GenerationRequest,
    Sampling,
    VLLMConfig,
)

# "default": vLLM's own warnings are no errors in a process that is forked from this one either
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
PROMPT = (5, 9, 33, 12, 7)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in engine_environment().items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)


async def test_workers_that_share_layers_compute_with_weights_that_vllm_emulates(tmp_path):
    model = random_qwen3(0, vocabulary=64, context=256).eval()
    model.save_pretrained(tmp_path / "model")
    write_quantised("mxfp8", tmp_path / "model", tmp_path / "quantised")
    config = VLLMConfig(
        dtype="bfloat16", context_length=256, kv_cache_mib=16, tensor_parallel=2, shutdown_s=5.0
    )
    setup = EngineSetup(model_path=tmp_path / "quantised", may_fork=may_fork())
    engine = await config.build(setup)
    sampling = Sampling(max_new_tokens=100, seed=7)
    request = GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=sampling)
    try:
        async with asyncio.timeout(120):
            (sample,) = [sample async for sample in engine.generate([request])]
    finally:
        await engine.aclose()
    exact = logprobs(model, sample.token_ids)
    rounded = logprobs(dequantised(model, tmp_path / "quantised"), sample.token_ids)
    far, near = (np.abs(sample.logprobs - expected).mean() for expected in (exact, rounded))
    assert near < far / 2, (near, far)  # what is left is the rounding of bfloat16


@torch.no_grad()
def dequantised(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """The model with the numbers that a checkpoint in MXFP8 stands for."""
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        values, exponents = tensors[name].float(), tensors.get(f"{name}_scale")
        if exponents is not None:
            values *= torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)
        parameter.copy_(values)
    return model


@torch.no_grad()
def logprobs(model: torch.nn.Module, token_ids: np.ndarray) -> np.ndarray:
    ids = torch.tensor([[*PROMPT, *token_ids.tolist()]])
    rows = torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1], dim=-1)
    return rows.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
