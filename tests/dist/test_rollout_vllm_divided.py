"""Engines of vLLM whose layers are spread over workers, and shared by some too.

Two clients of one engine give it weights, one that keeps the keys and values of requests in flight
and one that has them computed anew. What the tokens have for log-probs is known from one model of
transformers for each version, which nobody divided.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

from engines_forked import engine_environment, may_fork  # noqa: E402
from over_versions import logits_over_versions  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    EngineSetup,
    GeneratedSample,
    GenerationRequest,
    KvPolicy,
    RolloutEngine,
    Sampling,
    VLLMConfig,
    attach_vllm,
)
from cosmos_weightsync import WeightReceiver, WeightSender, shards_of  # noqa: E402
from cosmos_weightsync.integrations.vllm import VLLMWeightClient, engine_arguments  # noqa: E402

# "default": vLLM's own warnings are no errors in a process that is forked from this one either
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]
LAYOUTS = {
    "pp2": {"pipeline_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
PROMPTS = tuple((first, 9, 33, 12, 7) for first in range(6))
NUM_NEW = 240
MODES: tuple[KvPolicy, ...] = ("keep", "recompute")
NEAR = 1e-2 if torch.cuda.is_available() else 1e-3  # attention in float32 is in TF32 on GPUs


def build(version: int) -> torch.nn.Module:
    return random_qwen3(version, vocabulary=64, context=256).eval()


@dataclass
class World:
    engines: Mapping[KvPolicy, RolloutEngine]
    trained: torch.nn.Module
    sender: WeightSender
    client: VLLMWeightClient
    version: int = 0

    async def load_next(self, kv: KvPolicy) -> float:
        """Give the engine another version; return for how many seconds it stood still."""
        self.version += 1
        self.trained.load_state_dict(build(self.version).state_dict())
        await asyncio.to_thread(self.sender.publish, self.version)
        report = await self.engines[kv].load_version(self.version, [self.sender.endpoint])
        assert report.version == self.version
        return report.stall_s

    async def answers(self, kv: KvPolicy, **sampling) -> list[GeneratedSample]:
        requests = [
            GenerationRequest(
                request_id=f"r{i}",
                prompt_token_ids=prompt,
                sampling=Sampling(seed=i, **sampling),
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        async with asyncio.timeout(120):
            found = {s.request_id: s async for s in self.engines[kv].generate(requests)}
        return [found[request.request_id] for request in requests]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=LAYOUTS.values(), ids=LAYOUTS.keys()
)
async def world(request, tmp_path_factory) -> AsyncIterator[World]:
    before = dict(os.environ)
    os.environ.update(engine_environment())
    torch.set_num_threads(1)
    path, trained = tmp_path_factory.mktemp("model"), build(0)
    trained.save_pretrained(path)
    clients: dict[KvPolicy, VLLMWeightClient] = {}
    llms = []

    def client(llm, kv) -> VLLMWeightClient:
        llms.append(llm)
        for mode in MODES:
            clients[mode] = VLLMWeightClient(
                llm, kv_cache=mode, salted=True, init_info={"serve_host": "127.0.0.1"}
            )
        return clients[kv]

    config = VLLMConfig(
        dtype="float32", context_length=256, kv="keep", progress_tokens=1, **request.param
    )
    setup = EngineSetup(
        model_path=path,
        weight_client=client,
        engine_arguments=engine_arguments(),
        may_fork=may_fork(),
    )
    engine = await config.build(setup)
    other = await attach_vllm(llms.pop(), weight_client=clients["recompute"])
    engines: dict[KvPolicy, RolloutEngine] = {"keep": engine, "recompute": other}
    with WeightSender(shards_of(trained)) as sender:
        try:
            yield World(engines, trained, sender, clients["keep"])
        finally:
            await engine.aclose()
            os.environ.clear()
            os.environ.update(before)


async def sampled(engine: RolloutEngine, num_tokens: int) -> None:
    """Wait until the engine has sampled more than so many."""
    async with asyncio.timeout(60):
        while engine.num_tokens_generated <= num_tokens:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)


def expected(index: int, sample: GeneratedSample, kv: KvPolicy) -> tuple[np.ndarray, list[int]]:
    """Return the log-probs of a sample's tokens, and which tokens were likeliest in their place."""
    ids = [*PROMPTS[index], *sample.token_ids.tolist()]
    table = torch.log_softmax(logits_over_versions(build, kv, ids, sample.versions), dim=-1)
    picked = table.gather(1, torch.tensor(sample.token_ids[:, None]).long())[:, 0]
    return picked.numpy(), table.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
async def test_tokens_are_drawn_as_one_worker_would(world, temperature):
    await world.load_next("keep")
    samples = await world.answers("keep", temperature=temperature, max_new_tokens=60)
    for i, sample in enumerate(samples):
        assert [(s.version, s.length) for s in sample.versions] == [(world.version, 60)]
        logprobs, likeliest = expected(i, sample, "keep")
        np.testing.assert_allclose(sample.logprobs, logprobs, atol=NEAR)
        assert (sample.token_ids.tolist() == likeliest) == (temperature == 0.0)


async def test_workers_serve_together_all_that_they_loaded(world, request):
    await world.load_next("keep")
    num_workers = 4 if "tp2" in request.node.callspec.id else 2
    assert len(world.client.endpoints) == num_workers
    with WeightReceiver(world.client.endpoints) as newcomer:
        assert (await asyncio.to_thread(newcomer.stage, world.version)).version == world.version
        fetched = {shard.spec.name: shard.tensor.clone() for shard in newcomer.staged_shards()}
    expected = dict(build(world.version).named_parameters())
    assert fetched.keys() == expected.keys()
    for name, tensor in fetched.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=0)


@pytest.mark.parametrize("kv", MODES)
async def test_each_token_has_the_logprob_of_the_weights_and_the_cache_that_it_met(world, kv):
    """Two changes within one answer, and the other way to treat the cache would be seen."""
    await world.load_next(kv)
    engine, begun = world.engines[kv], world.version
    before = engine.num_tokens_generated
    answering = asyncio.create_task(world.answers(kv, max_new_tokens=NUM_NEW))
    for of_each in (20, 60):
        await sampled(engine, before + of_each * len(PROMPTS))
        assert await world.load_next(kv) > 0.0
    samples = await answering
    (other,) = set(MODES) - {kv}
    for i, sample in enumerate(samples):
        assert [span.version for span in sample.versions] == [begun, begun + 1, begun + 2]
        assert sum(span.length for span in sample.versions) == NUM_NEW
        np.testing.assert_allclose(sample.logprobs, expected(i, sample, kv)[0], atol=NEAR)
        assert np.abs(sample.logprobs - expected(i, sample, other)[0]).max() > 0.1
