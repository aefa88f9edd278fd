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
from over_versions import logits_over_versions  # noqa: E402
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
NUM_NEW = 200


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
    sampling = Sampling(max_new_tokens=NUM_NEW, seed=7)
    request = GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=sampling)
    async with asyncio.timeout(300):
        (sample,) = [sample async for sample in engine.generate([request])]
    return sample


async def begun(engine: RolloutEngine) -> None:
    """Wait for a tenth of a response."""
    enough = engine.num_tokens_generated + NUM_NEW // 10
    async with asyncio.timeout(300):
        while engine.num_tokens_generated < enough:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)


def deviation(sample: GeneratedSample) -> float:
    """The largest difference of log-probs from those of the versions that sampled them."""
    ids = [*PROMPT, *sample.token_ids.tolist()]
    table = torch.log_softmax(logits_over_versions(build, "keep", ids, sample.versions), dim=-1)
    expected = table.gather(1, torch.tensor(sample.token_ids[:, None]).long())[:, 0]
    return float(np.abs(expected.numpy() - sample.logprobs).max())


@pytest.mark.parametrize("compiled", ["yes", "auto"])
async def test_an_engine_on_a_cpu_compiles_if_it_is_asked_to_and_goes_on_by_new_weights(
    compiled, compiled_into, tmp_path
):
    build(0).save_pretrained(tmp_path / "model")
    config = VLLMConfig(
        dtype="float32", context_length=256, kv_cache_mib=16, progress_tokens=1, compiled=compiled
    )
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
            answering = asyncio.create_task(sampled(engine))
            await begun(engine)
            await engine.load_version(1, [sender.endpoint])
        over_both = await answering
        assert [span.version for span in over_both.versions] == [0, 1]
        assert deviation(over_both) < 1e-3
        assert deviation(await sampled(engine)) < 1e-3
    finally:
        await engine.aclose()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"  # for the others of this process
    assert bool(list(compiled_into.rglob("*.cpp"))) == (compiled == "yes")
