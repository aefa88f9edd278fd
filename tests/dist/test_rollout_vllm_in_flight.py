"""What becomes of requests in flight when weights come, also of those that the cache is short for.

The cache holds a thousand tokens, and the requests want more: vLLM takes the blocks of some of
them away, and computes their keys and values anew when there is room again.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

from engines_forked import engine_environment, may_fork  # noqa: E402
from over_versions import logits_over_versions  # noqa: E402
from paced_steps import PACED, Steps  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    EngineSetup,
    GeneratedSample,
    GenerationRequest,
    KvPolicy,
    RolloutEngine,
    Sampling,
    VLLMConfig,
)
from cosmos_weightsync import WeightSender, shards_of  # noqa: E402
from cosmos_weightsync.integrations.vllm import VLLMWeightClient, engine_arguments  # noqa: E402

# "default": vLLM's own warnings are no errors in a process that is forked from this one either
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]
PROMPT = (5, 9, 33, 12, 7)
COUNT, NUM_NEW = 6, 400
CACHED = (1 << 20) // (2 * 2 * 2 * 32 * 4)
"""Tokens of which 1 MiB holds keys and values: 2 layers, 2 heads of 32 numbers, float32."""
STEP_S, TRANSFER_S = 0.02, 0.5
COMMIT_S = 0.04
"""What a commit takes: less than this is no part of a transfer."""
# Attention in float32 is computed in TF32 on GPUs.
NEAR = 1e-2 if torch.cuda.is_available() else 1e-3


def build(version: int) -> torch.nn.Module:
    return random_qwen3(version, vocabulary=64, context=512).eval()


@dataclass
class Ordered:
    """Passes calls on to vLLM; notes when it was asked to stop, and when it had."""

    llm: Any
    stops: list[tuple[float, float]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    async def pause_generation(self, **how: Any) -> None:
        ordered = time.monotonic()
        await self.llm.pause_generation(**how)
        self.stops.append((ordered, time.monotonic()))


@dataclass
class World:
    kv: str
    engine: RolloutEngine
    trained: torch.nn.Module
    sender: WeightSender
    steps: Steps
    ordered: list[Ordered]

    async def publish(self, version: int) -> None:
        self.trained.load_state_dict(build(version).state_dict())
        await asyncio.to_thread(self.sender.publish, version)

    async def answer(self) -> dict[str, GeneratedSample]:
        requests = [
            GenerationRequest(
                request_id=f"r{i}",
                prompt_token_ids=PROMPT,
                sampling=Sampling(max_new_tokens=NUM_NEW, seed=i),
            )
            for i in range(COUNT)
        ]
        async with asyncio.timeout(200):
            return {sample.request_id: sample async for sample in self.engine.generate(requests)}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["keep", "recompute"])
async def world(request, tmp_path_factory) -> AsyncIterator[World]:
    before = dict(os.environ)
    os.environ.update(engine_environment())
    torch.set_num_threads(1)
    path, trained = tmp_path_factory.mktemp("model"), build(1)
    trained.save_pretrained(path)
    config = VLLMConfig(
        dtype="float32",
        context_length=512,
        kv=request.param,
        kv_cache_mib=1,
        prefix_caching=request.param == "recompute",
        progress_tokens=1,
    )
    steps, ordered = Steps(tmp_path_factory.mktemp("steps")), []
    os.environ.update(steps.environment)

    def client(llm, kv) -> VLLMWeightClient:
        ordered.append(Ordered(llm))
        return VLLMWeightClient(ordered[-1], kv_cache=kv, salted=True)

    setup = EngineSetup(
        model_path=path,
        weight_client=client,
        engine_arguments={**engine_arguments(), "logits_processors": [PACED]},
        may_fork=may_fork(),
    )
    engine = await config.build(setup)
    with WeightSender(shards_of(trained)) as sender:
        sender.publish(1)
        await engine.load_version(1, [sender.endpoint])
        try:
            yield World(request.param, engine, trained, sender, steps, ordered)
        finally:
            await engine.aclose()
            os.environ.clear()
            os.environ.update(before)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)


def logprobs(sample: GeneratedSample, kv: KvPolicy) -> np.ndarray:
    """What the tokens after a switch have with keys and values that were kept, or are new."""
    ids = [*PROMPT, *sample.token_ids.tolist()]
    table = torch.log_softmax(logits_over_versions(build, kv, ids, sample.versions), dim=-1)
    return table.gather(1, torch.tensor(sample.token_ids[:, None]).long())[:, 0].numpy()


async def test_preempted_requests_are_finished_with_the_weights_there_are_then(world):
    await world.publish(2)
    sampled = world.engine.num_tokens_generated
    answering = asyncio.create_task(world.answer())
    enough = sampled + CACHED - COUNT * len(PROMPT)
    await until(lambda: world.engine.num_tokens_generated > enough)
    assert world.engine.num_running == COUNT  # all begun, none done: the cache has not all of them
    await world.engine.load_version(2, [world.sender.endpoint])
    samples = await answering
    assert len(samples) == COUNT
    num_anew = 0
    for sample in samples.values():
        assert [span.version for span in sample.versions] == [1, 2]
        assert len(sample.token_ids) == NUM_NEW
        anew = logprobs(sample, "recompute")
        kept = anew if world.kv == "recompute" else logprobs(sample, "keep")
        # the first token, if any, that does not go on with the keys and values of before
        differs = np.flatnonzero(np.abs(sample.logprobs - kept) > NEAR)
        first = int(differs[0]) if len(differs) else NUM_NEW
        np.testing.assert_allclose(sample.logprobs[first:], anew[first:], atol=NEAR)
        num_anew += first < NUM_NEW
    assert 0 < num_anew < COUNT if world.kv == "keep" else num_anew == 0


async def test_an_engine_stands_still_for_the_commit_alone(world):
    """Weights that are half a second under way stop it for no longer than those that are there."""
    version, before = world.engine.weight_version, world.engine.num_tokens_generated
    (orders,) = world.ordered
    orders.stops.clear()
    world.steps.pace(STEP_S)
    answering = asyncio.create_task(world.answer())
    await until(lambda: world.engine.num_tokens_generated > before + 100)
    there, under_way = [], []
    for _ in range(3):
        version += 1
        await world.publish(version)
        report = await world.engine.load_version(version, [world.sender.endpoint])
        there.append(report.stall_s)
        version += 1
        loading = asyncio.create_task(world.engine.load_version(version, [world.sender.endpoint]))
        await asyncio.sleep(TRANSFER_S)
        await world.publish(version)
        report = await loading
        assert report.transfer_s > TRANSFER_S
        under_way.append(report.stall_s)
    assert world.engine.num_running == COUNT  # all of it in the midst of them
    world.steps.pace(0.0)
    assert len(await answering) == COUNT
    assert 0.0 < min(under_way) < min(there) + COMMIT_S
    sampled, stops = world.steps.sampled(), orders.stops
    assert len(stops) == 6
    late = [sum(ordered < at < stopped for at in sampled) for ordered, stopped in stops]
    assert sorted(late)[4] <= 1, "an order finds a step under way, and no other is begun"
    next_tokens = [
        min(at for at in sampled if at > stopped) - ordered for ordered, stopped in stops
    ]
    assert min(next_tokens) < TRANSFER_S / 2, "what is computed anew is so in the next step"
