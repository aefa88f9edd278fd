"""An engine that compiles on a CPU, where by default it does not."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

from capabilities import needs  # noqa: E402
from engines_forked import engine_environment, may_fork  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    EngineSetup,
    GeneratedSample,
    GenerationRequest,
    RolloutEngine,
    Sampling,
    VLLMConfig,
)
from cosmos_weightsync import WeightSender, shards_of  # noqa: E402
from cosmos_weightsync.integrations.vllm import VLLMWeightClient, engine_arguments  # noqa: E402

# "default": vLLM's own warnings are no errors in a process that is forked from this one either
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    needs("no-gpu", not torch.cuda.is_available()),
]
PROMPT = (5, 9, 33, 12, 7)


def build(version: int) -> torch.nn.Module:
    return random_qwen3(version, vocabulary=64, context=256).eval()


@pytest.fixture(autouse=True)
def compiled_into(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where compiled code is kept; nothing of runs before is there."""
    for name, value in engine_environment().items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "compiled"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    torch.set_num_threads(1)
    return folder


async def sampled(engine: RolloutEngine) -> GeneratedSample:
    sampling = Sampling(max_new_tokens=40, seed=7)
    request = GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=sampling)
    async with asyncio.timeout(300):
        (sample,) = [sample async for sample in engine.generate([request])]
    return sample


@torch.no_grad()
def deviation(sample: GeneratedSample) -> float:
    """The largest difference of log-probs from those of the version that sampled them."""
    ids = torch.tensor([[*PROMPT, *sample.token_ids.tolist()]])
    (span,) = sample.versions
    rows = torch.log_softmax(build(span.version)(ids).logits[0, len(PROMPT) - 1 : -1], dim=-1)
    expected = rows.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    return float(np.abs(expected.numpy() - sample.logprobs).max())


@pytest.mark.parametrize("compiled", ["yes", "auto"])
async def test_an_engine_on_a_cpu_compiles_if_it_is_asked_to(compiled, compiled_into, tmp_path):
    build(0).save_pretrained(tmp_path / "model")
    config = VLLMConfig(dtype="float32", context_length=256, kv_cache_mib=16, compiled=compiled)
    setup = EngineSetup(
        model_path=tmp_path / "model",
        weight_client=lambda llm, kv: VLLMWeightClient(llm, kv_cache=kv, salted=True),
        engine_arguments=engine_arguments(),
        may_fork=may_fork(),
    )
    engine = await config.build(setup)
    try:
        assert deviation(await sampled(engine)) < 1e-3
        with WeightSender(shards_of(build(1))) as sender:
            sender.publish(1)
            await engine.load_version(1, [sender.endpoint])
        assert deviation(await sampled(engine)) < 1e-3
    finally:
        await engine.aclose()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"  # for the others of this process
    assert bool(list(compiled_into.rglob("*.cpp"))) == (compiled == "yes")
