"""The real thing in one process tree: a producer over vLLM, weights pushed while groups generate.

The sender holds a model with tied embeddings, the case that a naive reload gets wrong on CPU.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

from engines_forked import engine_environment, may_fork  # noqa: E402
from number_tokens import Numbers  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402

from cosmos_app.recipe import WeightSyncConfig  # noqa: E402
from cosmos_app.roles.weights import vllm_client  # noqa: E402
from cosmos_core.messages import (  # noqa: E402
    Generate,
    GroupFailed,
    GroupFinished,
    GroupId,
    LoadFailed,
    LoadVersion,
    VersionLoaded,
)
from cosmos_core.trajectory import Trajectory  # noqa: E402
from cosmos_rollout import (  # noqa: E402
    EngineDeadError,
    EngineSetup,
    GenerationRequest,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    RolloutEngine,
    Sampling,
    Scored,
    VLLMConfig,
)
from cosmos_weightsync import (  # noqa: E402
    ReceiverConfig,
    TransferError,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.integrations.vllm import (  # noqa: E402
    VLLMWeightClient,
    engine_arguments,
)

# "default": vLLM's own warnings are no errors in a process that is forked from this one either
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]
NUM_NEW = 250


class OneForAll:
    """Scores every sample 1."""

    async def score(self, sample):
        return Scored(rewards={"one": 1.0}, total=1.0)

    async def score_group(self, samples, outcomes):
        return outcomes


def build(seed: int):
    return random_qwen3(seed, vocabulary=64, context=512, tied=True).eval()


class Breakable:
    """The client of cosmos_weightsync, which can be told to stop in the middle of a swap."""

    def __init__(self, llm, kv: str) -> None:
        self._llm, self.breaks = llm, False
        self._client = VLLMWeightClient(
            llm, kv_cache=kv, salted=True, init_info={"serve_host": "127.0.0.1"}
        )

    @property
    def cache_salt(self) -> str:
        return self._client.cache_salt

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._client.endpoints

    async def serve(self) -> Sequence[str]:
        return await self._client.serve()

    def describe_by(self, endpoints: Sequence[str]) -> None:
        self._client.describe_by(endpoints)

    async def connect(self, endpoints: Sequence[str]) -> None:
        await self._client.connect(endpoints)

    async def load(self, version: int):
        if self.breaks:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            raise ValueError("half of the tensors are in place")
        return await self._client.load(version)


@dataclass
class World:
    engine: RolloutEngine
    producer: Producer
    sender: WeightSender
    trained: torch.nn.Module
    clients: list[Breakable]
    stored: list[Trajectory]

    def submit(self, ordinal: int) -> None:
        group = GroupId(source="train", round=0, ordinal=ordinal)
        self.producer.submit(Generate(group=group, attempt=0, num_samples=4))

    async def events(self, count: int):
        async with asyncio.timeout(120):
            stream = self.producer.events()
            return [await anext(stream) for _ in range(count)]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[{}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}],
    ids=["one", "tp2", "pp2"],
)
async def world(request, tmp_path_factory) -> AsyncIterator[World]:
    before = dict(os.environ)
    os.environ.update(engine_environment())
    torch.set_num_threads(1)
    path, trained = tmp_path_factory.mktemp("model"), build(0)
    trained.save_pretrained(path)
    clients, stored = [], []

    def client(llm, kv) -> Breakable:
        clients.append(Breakable(llm, kv))
        return clients[-1]

    async def publish(trajectories):
        stored.extend(trajectories)
        return [f"{t.group}/{t.sibling}" for t in trajectories]

    config = VLLMConfig(
        dtype="float32", context_length=512, kv="recompute", progress_tokens=2, **request.param
    )
    arguments = engine_arguments()
    engine = await config.build(
        EngineSetup(
            model_path=path,
            weight_client=client,
            engine_arguments=arguments,
            may_fork=may_fork(),
        )
    )
    rows = [PromptRow(prompt_id=str(i), prompt=f"{i + 1} 7 21 {i + 3}") for i in range(9)]
    parts = ProducerParts(
        engine=engine,
        prompts={"train": PromptSet(rows, order="file")},
        tokenizer=Numbers(),
        scorer=OneForAll(),
        publish=publish,
    )
    sampling = Sampling(max_new_tokens=NUM_NEW, seed=2**40)
    producer = Producer(parts, ProducerConfig(slots=3, sampling=sampling), replica="rollout-0")
    sender = WeightSender(shards_of(trained))
    try:
        yield World(engine, producer, sender, trained, clients, stored)
    finally:
        await producer.aclose()
        await engine.aclose()
        sender.close()
        os.environ.clear()
        os.environ.update(before)


async def another_engine(path: Path, clients: list[Breakable]) -> RolloutEngine:
    """One that is not divided, with weights of its own; its client is added to the list."""
    build(5).save_pretrained(path)

    def client(llm, kv) -> Breakable:
        clients.append(Breakable(llm, kv))
        return clients[-1]

    setup = EngineSetup(
        model_path=path,
        weight_client=client,
        engine_arguments=engine_arguments(),
        may_fork=may_fork(),
    )
    return await VLLMConfig(dtype="float32", context_length=512).build(setup)


@torch.no_grad()
def reference(models, trajectory) -> np.ndarray:
    """Log-prob of every token after the first, under the model of the version that sampled it."""
    ids = torch.tensor(trajectory.token_ids[None].astype(np.int64))
    rows = [torch.log_softmax(model(ids).logits[0, :-1], dim=-1) for model in models]
    picked = torch.stack([row.gather(1, ids[0, 1:, None])[:, 0] for row in rows]).numpy()
    version = np.maximum(trajectory.version_of_each_step()[1:], 0)
    return picked[version, np.arange(len(version))]


async def deviation(engine: RolloutEngine, model) -> float:
    """The largest difference of a sample's log-probs from those of a model."""
    prompt = (3, 1, 4, 1, 5)
    sampling = Sampling(max_new_tokens=20, seed=7)
    request = GenerationRequest(request_id="one", prompt_token_ids=prompt, sampling=sampling)
    async with asyncio.timeout(120):
        (sample,) = [sample async for sample in engine.generate([request])]
    ids = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
    with torch.no_grad():
        rows = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], dim=-1)
    expected = rows.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return float(np.abs(expected.numpy() - sample.logprobs).max())


async def test_siblings_share_the_keys_and_values_of_their_prompt(world, monkeypatch):
    """Of 120 tokens those in whole blocks of 32, which are computed once."""
    reused: dict[str, int] = {}
    generate = world.engine._llm.generate

    async def noting(prompt, parameters, request_id):
        async for output in generate(prompt, parameters, request_id):
            reused[request_id] = output.num_cached_tokens
            yield output

    monkeypatch.setattr(world.engine._llm, "generate", noting)
    siblings = [
        GenerationRequest(
            request_id=f"sibling-{i}",
            prompt_token_ids=(*range(1, 61), *range(1, 61)),
            sampling=Sampling(max_new_tokens=3),
        )
        for i in range(4)
    ]
    async with asyncio.timeout(120):
        samples = [sample async for sample in world.engine.generate(siblings)]
    assert len(samples) == 4
    assert sorted(reused.values()) == [0, 96, 96, 96]


async def test_weights_pushed_while_groups_generate_are_exact_to_the_token(world):
    for ordinal in range(3):
        world.submit(ordinal)
    async with asyncio.timeout(120):
        while world.engine.num_tokens_generated < 200:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
    served_at = await world.clients[0].serve()
    with WeightReceiver(served_at) as reader:  # which waits for what no worker has yet
        waiting = asyncio.create_task(asyncio.to_thread(reader.stage, 1, timeout_s=120))
        world.trained.load_state_dict(build(1).state_dict())
        await asyncio.to_thread(world.sender.publish, 1)
        command = LoadVersion(version=1, endpoints=(world.sender.endpoint,))
        loaded = await world.producer.load(command)
        assert isinstance(loaded, VersionLoaded), loaded
        assert (await waiting).version == 1
    assert world.clients[0].endpoints == served_at
    assert loaded.version == world.engine.weight_version == 1
    assert loaded.stall_s > 0.0
    assert all(isinstance(event, GroupFinished) for event in await world.events(3))
    assert len(world.stored) == 12
    models = (build(0), build(1))
    for trajectory in world.stored:
        assert (trajectory.oldest_version, trajectory.newest_version) == (0, 1)
        expected = reference(models, trajectory)
        sampled = trajectory.trainable[1:]
        np.testing.assert_allclose(trajectory.logprobs[1:][sampled], expected[sampled], atol=1e-3)
    answers = {tuple(trajectory.token_ids.tolist()) for trajectory in world.stored}
    assert len(answers) == 12  # siblings draw from seeds of their own


async def test_whoever_comes_later_fetches_what_the_engine_has(world):
    """Every worker serves its own slices: together all that an engine needs."""
    (client,) = world.clients
    with WeightReceiver(client.endpoints) as newcomer:
        assert (await asyncio.to_thread(newcomer.stage, 1)).version == 1
        fetched = {}
        for shard in newcomer.staged_shards():
            fetched[shard.spec.name] = shard.tensor.clone()
    expected = dict(build(1).named_parameters())
    assert fetched.keys() == expected.keys()
    for name, tensor in fetched.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=0)


async def test_an_engine_fetches_from_an_engine_and_from_the_sender_then(world, tmp_path):
    """Of another layout where that one is divided; the first goes on serving what it has."""
    (first,), later = world.clients, []
    engine = await another_engine(tmp_path, later)
    try:
        await engine.load_version(1, first.endpoints)
        assert await deviation(engine, build(1)) < 1e-3
        served_at = later[0].endpoints
        assert len(served_at) == 1
        world.trained.load_state_dict(build(2).state_dict())
        await asyncio.to_thread(world.sender.publish, 2)
        await engine.load_version(2, [world.sender.endpoint])
        assert await deviation(engine, build(2)) < 1e-3
        assert (engine.weight_version, world.engine.weight_version) == (2, 1)
        assert later[0].endpoints == served_at
    finally:
        await engine.aclose()


async def test_an_engine_has_its_first_version_from_one_that_has_none_yet(world, tmp_path):
    """It finds out meanwhile what it needs, by what the sender says of the tensors."""
    clients = []
    engine = await another_engine(tmp_path, clients)
    serving = ReceiverConfig(serve_host="127.0.0.1")
    try:
        served_at = await clients[0].serve()
        with WeightReceiver(config=serving) as relay, WeightReceiver(served_at) as reader:
            clients[0].describe_by([world.sender.endpoint])
            load = asyncio.create_task(engine.load_version(2, [relay.endpoint]))
            read = asyncio.create_task(asyncio.to_thread(reader.stage, 2, timeout_s=120))
            relay.connect([world.sender.endpoint])
            await asyncio.to_thread(relay.stage, 2)
            assert (await load).version == (await read).version == 2
        assert await deviation(engine, build(2)) < 1e-3
        assert clients[0].endpoints == served_at
    finally:
        await engine.aclose()


async def test_an_engine_that_is_not_to_stage_stands_still_until_the_weights_are_there(world):
    sync = WeightSyncConfig(staged=False, deadline_s=60.0)
    client = vllm_client(sync, world.engine._llm, "recompute")
    with WeightSender(shards_of(build(1))) as sender:  # the weights and the version there are
        await client.connect([sender.endpoint])
        enough = world.engine.num_tokens_generated + 4 * NUM_NEW
        world.submit(6)
        loading = asyncio.create_task(client.load(1))
        await asyncio.sleep(1.0)
        before = world.engine.num_tokens_generated
        await asyncio.sleep(0.5)
        assert world.engine.num_tokens_generated == before < enough
        await asyncio.to_thread(sender.publish, 1)
        times = await loading
        assert times.stall_s > times.transfer_s > 1.0
    assert [type(event) for event in await world.events(1)] == [GroupFinished]
    with pytest.raises(TransferError):
        await client.load(2)
    assert await deviation(world.engine, build(1)) < 1e-3


async def test_a_sender_that_is_gone_leaves_the_weights_there_are(world):
    world.sender.close()
    world.submit(4)
    command = LoadVersion(version=2, endpoints=(world.sender.endpoint,))
    event = await world.producer.load(command)
    assert isinstance(event, LoadFailed)
    assert event.version == 2
    assert "version 2 could not be loaded" in event.reason
    (finished,) = await world.events(1)
    assert isinstance(finished, GroupFinished)
    assert {sample.newest_version for sample in finished.samples} == {1}


async def test_a_swap_that_breaks_half_way_ends_the_engine_and_what_is_in_flight(world):
    world.submit(5)
    world.clients[0].breaks = True
    with pytest.raises(EngineDeadError, match="version 3 is half loaded"):
        await world.producer.load(LoadVersion(version=3, endpoints=(world.sender.endpoint,)))
    (failed,) = await world.events(1)
    assert isinstance(failed, GroupFailed)
    assert "half loaded" in failed.reason
    with pytest.raises(EngineDeadError):
        await world.events(1)
