"""Taking turns on one set of devices: who has them, and that nothing is lost on the way."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from cosmos_app.errors import RunError
from cosmos_app.recipe import Recipe
from cosmos_app.roles.colocated import Bed, Sleeper
from cosmos_app.roles.put_away import PutAway
from cosmos_app.roles.turns import Turn
from cosmos_app.roles.weights import Staged
from cosmos_core.config import ConfigError, load_config
from cosmos_core.messages import Generate, GroupFinished, GroupId, LoadVersion, VersionLoaded
from cosmos_core.trajectory import Trajectory
from cosmos_parallel import (
    AdamW8bitConfig,
    EmaConfig,
    Learner,
    LearnerConfig,
    ParallelConfig,
    build_mesh,
    init_distributed,
    open_store,
    shard_module,
    shutdown_distributed,
)
from cosmos_rollout import (
    EngineSetup,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    RewardInput,
    RolloutEngine,
    Sampling,
    Scored,
    ScriptedConfig,
)

SYNCHRONOUS = ["staleness.depth=0", "staleness.bound=0"]


async def test_rollouts_have_the_devices_together_and_the_policy_alone(tmp_path: Path):
    one, other = (Turn(tmp_path, "rollout", deadline_s=30) for _ in range(2))
    policy = Turn(tmp_path, "policy", deadline_s=30)
    await one.take()
    await other.take()
    waiting = asyncio.create_task(policy.take())
    one.give()
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert other.is_mine
    other.give()
    assert await asyncio.wait_for(waiting, 30) > 0.0
    late = Turn(tmp_path, "rollout", deadline_s=0.05)
    with pytest.raises(RunError, match=r"waited 0\.05 s for the policy to let go"):
        await late.take()
    policy.give()
    await late.take()
    assert await late.take() == 0.0  # it has them
    late.give()


def hold(path: Path, said) -> None:
    asyncio.run(Turn(path, "rollout", deadline_s=30).take())
    said.set()
    signal.pause()


async def test_whoever_is_killed_lets_go(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    said = context.Event()
    process = context.Process(target=hold, args=(tmp_path, said))
    process.start()
    assert await asyncio.to_thread(said.wait, 120)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    policy = Turn(tmp_path, "policy", deadline_s=30)
    await policy.take()
    policy.give()
    process.join(30)


async def test_a_process_forked_meanwhile_keeps_nobody_waiting(tmp_path: Path):
    rollout, policy = (Turn(tmp_path, side, deadline_s=30) for side in ("rollout", "policy"))
    await rollout.take()
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()  # as vLLM's engine is, with all that is open
    rollout.give()
    await policy.take()
    policy.give()
    process.kill()
    process.join(30)


def test_what_was_put_away_comes_back_to_the_same_bits():
    def train(puts_away: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        view = model[0].weight.detach()[2:4]  # as a sender of weights holds one
        belongings = PutAway([model], optimizer)
        for step in range(4):
            if puts_away:
                freed = belongings.away()
                # weights, and after a step gradients, two moments and a counter of each of four
                assert freed == 4 * (8 * 16 + 16 + 16 * 4 + 4) * (4 if step else 1) + 16 * (
                    step > 0
                )
                assert belongings.away() == 0
                assert model[0].weight.untyped_storage().nbytes() == 0
                belongings.back()
                belongings.back()
            optimizer.zero_grad(set_to_none=False)
            model(torch.ones(3, 8)).square().sum().backward()
            optimizer.step()
            torch.testing.assert_close(view, model[0].weight[2:4], rtol=0, atol=0)
        return [parameter.detach() for parameter in model.parameters()]

    for one, other in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_moments_in_8_bits_and_averages_are_put_away_too():
    pytest.importorskip("torchao")
    model = torch.nn.Linear(64, 64, bias=False)
    learner = Learner(
        model, LearnerConfig(optimizer=AdamW8bitConfig(lr=0.01), ema=EmaConfig(decay=0.5))
    )
    learner.optimizer.zero_grad(set_to_none=False)
    model(torch.ones(3, 64)).square().sum().backward()
    learner.optimizer.step()
    model.zero_grad(set_to_none=True)
    assert learner.ema is not None
    (average,) = learner.ema.averages.values()
    moment = learner.optimizer.state[model.weight]["exp_avg"]
    codes, before = moment.codes, moment.dequantize().clone()

    belongings = PutAway([model], learner.optimizer, [average])
    freed = belongings.away()
    # weights and average; of each of two moments 4096 codes, 16 scales and a map of 256; the count
    assert freed == 2 * 4 * 64 * 64 + 2 * (64 * 64 + 4 * 16 + 4 * 256) + 4
    assert codes.untyped_storage().nbytes() == average.untyped_storage().nbytes() == 0
    belongings.back()
    torch.testing.assert_close(moment.dequantize(), before, rtol=0, atol=0)


def test_what_a_frozen_model_has_gathered_is_given_up():
    process = init_distributed(0, 1, store=open_store("127.0.0.1", 0, hosting=True))
    try:
        mesh = build_mesh(ParallelConfig(), process)
        model = torch.nn.Linear(8, 4).requires_grad_(False)
        shard_module(model, mesh, blocks=[])
        expected = model(torch.ones(3, 8))
        assert not isinstance(model.weight, DTensor)  # gathered, as nothing goes back through it
        belongings = PutAway([model], torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
        assert belongings.away() == 4 * (8 * 4 + 4)
        is_sharded = isinstance(model.weight, DTensor)
        belongings.back()
        assert is_sharded
        torch.testing.assert_close(model(torch.ones(3, 8)), expected, rtol=0, atol=0)
    finally:
        shutdown_distributed()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["staleness.depth=1"], r"staleness\.depth = 0"),
        ([*SYNCHRONOUS, "policy.replicas=2"], "one policy replica has the devices"),
        ([*SYNCHRONOUS, "rollout.engine.kind=endpoint", "rollout.engine.url=http://a/v1",
          "rollout.engine.model=m"], "cannot be put to sleep"),
    ],
)  # fmt: skip
def test_runs_that_cannot_take_turns_are_refused(tmp_path, overrides: list[str], message: str):
    path = tmp_path / "recipe.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match=message):
        load_config(Recipe, path, ["rollout.colocate=keep", *overrides])


class Fives:
    """A tokenizer of digits, and a reward of 1 for anything."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(str, token_ids))

    async def score(self, sample: RewardInput) -> Scored:
        return Scored(rewards={"one": 1.0}, total=1.0)

    async def score_group(self, samples, outcomes):
        return outcomes


def producer_of(engine: RolloutEngine) -> Producer:
    async def publish(trajectories: Sequence[Trajectory]) -> list[str]:
        return [f"{t.group}.{t.sibling}" for t in trajectories]

    both = Fives()
    rows = PromptSet([PromptRow(prompt_id="row", prompt="5")], order="file")
    return Producer(
        ProducerParts(
            engine=engine, prompts={"train": rows}, tokenizer=both, scorer=both, publish=publish
        ),
        ProducerConfig(sampling=Sampling(max_new_tokens=8)),
        replica="rollout-0",
    )


@pytest.mark.parametrize("weights", ["keep", "discard"])
async def test_an_engine_has_the_devices_only_while_it_has_work(tmp_path: Path, weights):
    engine = await ScriptedConfig(mean_length=4, step_s=0.001).build(
        EngineSetup(model_path=tmp_path)
    )
    producer = producer_of(engine)
    told: list[str] = []

    async def report(values: dict[str, float]) -> None:
        told.extend(values)

    async def load(command: LoadVersion) -> None:
        assert isinstance(await producer.load(command), VersionLoaded)

    mine, policy = (Turn(tmp_path, side, deadline_s=30) for side in ("rollout", "policy"))
    await mine.take()  # as while it started
    bed = Bed(engine=engine, producer=producer, turn=mine, weights=weights)
    sleeper = Sleeper(
        bed, take=lambda c: producer.submit(c) if isinstance(c, Generate) else None, report=report
    )
    alternating = asyncio.create_task(sleeper.alternate(load))
    events = producer.events()
    for step in range(3):
        await policy.take()  # it sleeps: nobody else has the devices
        sleeper.hand(LoadVersion(version=step + 1, endpoints=()))
        group = GroupId(source="train", round=0, ordinal=step)
        sleeper.hand(Generate(group=group, attempt=0, num_samples=2))
        await asyncio.sleep(0.02)
        assert engine.num_running == 0
        assert not mine.is_mine
        policy.give()
        event = await asyncio.wait_for(anext(events), 30)
        assert isinstance(event, GroupFinished)
        assert {ref.newest_version for ref in event.samples} == {step + 1}
    await policy.take()
    policy.give()
    assert told.count("sleep_s") == 4
    assert told.count("wake_s") == 3
    alternating.cancel()
    await asyncio.gather(alternating, return_exceptions=True)
    await producer.aclose()
    await engine.aclose()


class Lost:
    """Weights that are there the first time alone."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def stage(self, version: int, endpoints: Sequence[str]) -> Staged:
        if version in self.versions:
            raise OSError("nobody has it any more")
        self.versions.append(version)
        return Staged(version=version, tensors={})


async def test_weights_that_were_given_up_and_cannot_be_had_again_end_the_replica(tmp_path: Path):
    """The engine would never generate again, and be thought to work."""
    engine = await ScriptedConfig().build(EngineSetup(model_path=tmp_path, weight_source=Lost()))
    producer = producer_of(engine)

    async def report(values: dict[str, float]) -> None:
        del values

    async def load(command: LoadVersion) -> None:
        assert isinstance(await producer.load(command), VersionLoaded)

    turn = Turn(tmp_path, "rollout", deadline_s=30)
    bed = Bed(engine=engine, producer=producer, turn=turn, weights="discard")
    sleeper = Sleeper(bed, take=lambda command: None, report=report)
    alternating = asyncio.create_task(sleeper.alternate(load))
    sleeper.hand(LoadVersion(version=1, endpoints=()))
    await asyncio.sleep(0.1)  # loaded, and given up again
    group = GroupId(source="train", round=0, ordinal=0)
    sleeper.hand(Generate(group=group, attempt=0, num_samples=2))
    with pytest.raises(RunError, match=r"cannot be had again: .*nobody has it any more"):
        await asyncio.wait_for(alternating, 30)
    turn.give()
    await producer.aclose()
    await engine.aclose()
