"""vLLM's sleep mode on a GPU: its memory is free, and it goes on with the same tokens."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

import numpy as np  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    EngineError,
    EnginePausedError,
    EngineSetup,
    GeneratedSample,
    GenerationRequest,
    RolloutEngine,
    Sampling,
    VLLMConfig,
)
from cosmos_weightsync import WeightSender, shards_of  # noqa: E402
from cosmos_weightsync.integrations.vllm import VLLMWeightClient, engine_arguments  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]
PROMPT, LENGTH, KV_MIB = (5, 9, 33, 12, 7), 300, 2048


@dataclass
class World:
    engine: RolloutEngine
    sender: WeightSender
    trained: torch.nn.Module


def build(seed: int):
    return random_qwen3(seed, vocabulary=64, context=512, tied=True).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory) -> AsyncIterator[World]:
    path, trained = tmp_path_factory.mktemp("model"), build(0)
    trained.save_pretrained(path)
    config = VLLMConfig(
        dtype="float32",
        context_length=512,
        kv_cache_mib=KV_MIB,
        gpu_memory_share=0.3,
        compiled="no",
        progress_tokens=1,
    )
    engine = await config.build(
        EngineSetup(
            model_path=path,
            can_sleep=True,
            weight_client=lambda llm, kv: VLLMWeightClient(llm, kv_cache=kv, salted=True),
            engine_arguments=engine_arguments(),
        )
    )
    sender = WeightSender(shards_of(trained))
    try:
        yield World(engine, sender, trained)
    finally:
        await engine.aclose()
        sender.close()


async def generate(engine: RolloutEngine, seeds: Sequence[int] = range(4)) -> list[GeneratedSample]:
    requests = [
        GenerationRequest(
            request_id=f"r{seed}",
            prompt_token_ids=PROMPT,
            sampling=Sampling(temperature=0.8, max_new_tokens=LENGTH, seed=seed),
        )
        for seed in seeds
    ]
    async with asyncio.timeout(120), aclosing(engine.generate(requests)) as samples:
        found = [sample async for sample in samples]
    return sorted(found, key=lambda sample: sample.request_id)


def free_mib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**20


@torch.no_grad()
def deviation(model, sample: GeneratedSample) -> float:
    ids = torch.tensor([[*PROMPT, *sample.token_ids.tolist()]])
    rows = torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1] / 0.8, dim=-1)
    expected = rows.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    return float(np.abs(expected.numpy() - sample.logprobs).max())


async def test_requests_in_flight_go_on_with_the_tokens_of_who_never_slept(world: World):
    engine = world.engine
    expected = await generate(engine)
    assert max(deviation(build(0), sample) for sample in expected) < 5e-2
    before, free = engine.num_tokens_generated, free_mib()
    generating = asyncio.create_task(generate(engine))
    while engine.num_tokens_generated < before + 40:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)
    with pytest.raises(EngineError, match="nothing in flight"):
        await engine.sleep("discard")
    await engine.sleep("keep")
    assert free_mib() - free > 0.9 * KV_MIB
    slept_at = engine.num_tokens_generated
    assert slept_at < before + 4 * LENGTH
    with pytest.raises(EnginePausedError, match="wake the engine"):
        await engine.load_version(3, [])
    await asyncio.sleep(0.2)
    assert engine.num_tokens_generated == slept_at
    await engine.wake()
    assert abs(free_mib() - free) < 0.1 * KV_MIB
    for one, other in zip(expected, await generating, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)


async def test_weights_that_were_given_up_are_fetched_again(world: World):
    engine, free = world.engine, free_mib()
    world.trained.load_state_dict(build(1).state_dict())
    await asyncio.to_thread(world.sender.publish, 1)
    await engine.sleep("discard")
    assert free_mib() - free > 0.9 * KV_MIB
    await engine.wake()
    assert (await engine.load_version(1, [world.sender.endpoint])).version == 1
    for sample in await generate(engine):
        assert deviation(build(1), sample) < 5e-2
        assert sample.versions[-1].version == 1
