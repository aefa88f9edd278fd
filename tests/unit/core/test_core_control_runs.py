"""Whole runs of the controller in a random world: nothing lost, bounds kept, no standstill.

The world is a few replicas that answer commands after random delays, die, come back under the
same name, repeat themselves and are late. Time is simulated.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest

from cosmos_core.control import ALL_DONE, Controller, ControllerConfig, StalenessConfig
from cosmos_core.control.config import ValidationPlan
from cosmos_core.messages import (
    CheckpointSaved,
    Command,
    Event,
    Generate,
    GroupFailed,
    GroupFinished,
    LoadVersion,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    StepFinished,
    Stop,
    StopRequested,
    Tick,
    Train,
    VersionLoaded,
    VersionPublished,
    decode_command,
    encode_message,
)


@dataclass
class World:
    """Replicas that answer after random delays; ``trained`` is what each step trained on."""

    controller: Controller
    rng: random.Random
    kills: int = 0
    failures: float = 0.0
    restart_controller: float = 0.0
    queue: list[tuple[float, int, Event]] = field(default_factory=list)
    count: itertools.count = field(default_factory=itertools.count)
    versions: dict[str, int] = field(default_factory=dict)
    loading: dict[str, int] = field(default_factory=dict)
    trained: dict[int, tuple[tuple[SampleRef, ...], ...]] = field(default_factory=dict)
    now: float = 0.0
    saved: list[int] = field(default_factory=list)
    with_signal: set[str] = field(default_factory=set)
    ordered: list[tuple[int, int]] = field(default_factory=list)
    cuts: dict[int, bytes] = field(default_factory=dict)

    def later(self, event: Event, longest: float = 1.0) -> None:
        heapq.heappush(
            self.queue, (self.now + self.rng.uniform(0.01, longest), next(self.count), event)
        )

    def join(self, name: str, role: str, version: int = 0) -> None:
        self.versions[name] = version
        self.later(
            ReplicaJoined(
                replica=name,
                role=role,  # type: ignore[arg-type]
                slots=5 if role == "rollout" else 0,
                version=version,
                endpoints=("here",) if role == "policy" else (),
            )
        )

    def run(self, most_events: int = 40_000) -> None:
        for _ in range(most_events):
            if self.controller.finished:
                return
            if self.queue:
                self.now, _, event = heapq.heappop(self.queue)
            else:
                self.now += 1.0
                event = Tick()
            self.deliver(event)
            if self.rng.random() < 0.02:
                self.deliver(event)  # at least once
            if self.rng.random() < 0.05:
                for name in sorted(self.versions):
                    self.deliver(Progress(replica=name, count=0))
                self.deliver(Tick())
            if self.kills and self.rng.random() < 0.01:
                self.kill()
        pytest.fail(f"standstill: waiting for {self.controller.waiting_for(self.now)}")

    def deliver(self, event: Event) -> None:
        commands = self.controller.handle(event, self.now)
        if self.rng.random() < self.restart_controller:
            self.controller = Controller.restore(self.controller.config, self.controller.snapshot())
        for name, command in commands:
            self.obey(name, decode_command(encode_message(command)))

    def kill(self) -> None:
        name = self.rng.choice(sorted(n for n in self.versions if n.startswith("rollout")))
        self.kills -= 1
        self.queue = [entry for entry in self.queue if getattr(entry[2], "replica", "") != name]
        heapq.heapify(self.queue)
        if self.rng.random() < 0.5:
            self.later(ReplicaLeft(replica=name, reason="killed"))
        self.loading.pop(name, None)
        self.join(name, "rollout")

    def obey(self, name: str, command: Command) -> None:
        match command:
            case Generate():
                self.generate(name, command)
            case LoadVersion():
                self.versions[name] = command.version
                self.later(
                    VersionLoaded(
                        replica=name,
                        version=command.version,
                        transfer_s=0.1,
                        stall_s=0.01,
                        lineage=command.lineage,
                    ),
                    2.0,
                )
            case Train():
                self.train(name, command)
            case Stop():
                if name.startswith("policy"):
                    step, lineage = self.versions[name] - 1, len(self.controller.state.line)
                    self.later(CheckpointSaved(replica=name, step=step, path="x", lineage=lineage))
                    self.cuts[self.versions[name]] = command.cut

    def generate(self, name: str, command: Generate) -> None:
        if command.group.source == "train":
            self.ordered.append((command.group.ordinal, command.attempt))
        if self.rng.random() < self.failures:
            self.later(
                GroupFailed(
                    replica=name, group=command.group, attempt=command.attempt, reason="engine"
                )
            )
            return
        oldest = self.versions[name] if self.rng.random() < 0.5 else self.known(name)
        samples = tuple(
            SampleRef(
                sibling=i,
                status="completed",
                key=f"{command.group}/{i}/{command.attempt}",
                num_tokens=self.rng.randint(1, 9),
                reward=float(self.rng.randint(0, 1)),
                oldest_version=oldest,
                newest_version=self.versions[name],
            )
            for i in range(command.num_samples)
        )
        if len({sample.reward for sample in samples}) > 1:
            self.with_signal.update(sample.key for sample in samples)
        self.later(
            GroupFinished(
                replica=name, group=command.group, attempt=command.attempt, samples=samples
            ),
            self.rng.choice([0.5, 1.0, 8.0]),
        )
        self.later(Progress(replica=name, count=1), 5.0)

    def known(self, name: str) -> int:
        replica = self.controller.state.replicas.get(name)
        return max(0, replica.version) if replica else self.versions[name]

    def train(self, name: str, command: Train) -> None:
        if name == "policy-0":
            assert command.step not in self.trained, "a step is trained twice"
            self.trained[command.step] = command.groups
        self.versions[name] = command.step + 1
        if command.cut:
            self.cuts[command.step + 1] = command.cut
        lineage = len(command.line)
        self.later(StepFinished(replica=name, step=command.step, lineage=lineage), 0.5)
        version = command.step + 1
        self.later(VersionPublished(replica=name, version=version, lineage=lineage), 0.6)


def _config(depth: int, bound: int, **changes: object) -> ControllerConfig:
    fields: dict[str, object] = {
        "num_steps": 12,
        "groups_per_step": 4,
        "samples_per_group": 2,
        "staleness": StalenessConfig(depth=depth, bound=bound),
        "validation": ValidationPlan(num_prompts=7, every=5),
        "checkpoint_every": 4,
        "lease_s": 12.0,
    }
    return ControllerConfig(**{**fields, **changes})  # type: ignore[arg-type]


def _world(config: ControllerConfig, seed: int, **changes: object) -> World:
    world = World(Controller(config), random.Random(seed), **changes)  # type: ignore[arg-type]
    for index in range(config.num_policies):
        world.join(f"policy-{index}", "policy")
    for index in range(3):
        world.join(f"rollout-{index}", "rollout")
    return world


def _assert_complete(world: World) -> None:
    config = world.controller.config
    books = world.controller.books()
    assert world.controller.finished == ALL_DONE
    assert sorted(world.trained) == list(range(config.num_steps))
    assert books.consumed == config.num_steps * config.groups_per_step
    for step, groups in world.trained.items():
        staleness = [step - min(s.oldest_version for s in group) for group in groups]
        assert min(staleness) >= 0
        assert max(staleness) <= config.staleness.bound
    keys = [sample.key for groups in world.trained.values() for g in groups for sample in g]
    assert len(keys) == len(set(keys)), "a sample is trained on twice"


@pytest.mark.parametrize(("depth", "bound"), [(0, 0), (0, 1), (1, 1), (2, 2), (2, 4), (3, 8)])
@pytest.mark.parametrize("seed", range(8))
def test_a_run_ends_with_balanced_books_within_the_bound(depth: int, bound: int, seed: int) -> None:
    world = _world(_config(depth, bound), seed)
    world.run()
    _assert_complete(world)
    assert world.controller.books().dropped == {}


@pytest.mark.parametrize(("depth", "bound"), [(0, 0), (2, 4)])
@pytest.mark.parametrize("seed", range(12))
def test_deaths_failures_and_controller_restarts_lose_nothing(
    depth: int, bound: int, seed: int
) -> None:
    config = _config(depth, bound, max_attempts=1000, num_policies=2)
    world = _world(config, seed, kills=6, failures=0.1, restart_controller=0.2)
    world.run()
    _assert_complete(world)


@pytest.mark.parametrize(("depth", "bound"), [(0, 0), (1, 2), (2, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_groups_without_signal_are_replaced_one_for_one_and_nothing_is_sampled_in_vain(
    depth: int, bound: int, seed: int
) -> None:
    """Half of the pairs of rewards are equal: 48 groups take about 96 prompts, and not one more."""
    world = _world(_config(depth, bound, drop_zero_signal=True), seed)
    world.run()
    _assert_complete(world)
    books = world.controller.books()
    trained = {sample.key for groups in world.trained.values() for g in groups for sample in g}
    assert trained == world.with_signal, "all that was worth training on was trained on"
    assert books.dropped.keys() == {"no signal"}
    assert books.issued == 48 + books.dropped["no signal"]
    assert 60 < books.issued < 150


def test_synchronous_runs_train_every_prompt_in_order_on_its_own_version() -> None:
    world = _world(_config(0, 0), seed=3)
    world.run()
    for step, groups in world.trained.items():
        ordinals = [int(g[0].key.split("/")[0].split(".")[2]) for g in groups]
        assert ordinals == list(range(4 * step, 4 * step + 4))
        assert {s.oldest_version for g in groups for s in g} == {step}


@pytest.mark.parametrize("seed", range(6))
def test_validations_are_answered_by_one_version_first_and_last_included(seed: int) -> None:
    world = _world(_config(2, 4), seed)
    world.run()
    rounds = world.controller.state.rounds_done
    assert rounds[0].version == 0
    assert rounds[-1].version == 12
    assert all(result.count == 7 for result in rounds)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_validation_is_of_a_version_that_is_due_and_there_is_one_each_time(
    depth: int, seed: int
) -> None:
    """Rollouts get a version after its step has ended; what they have until then is not due."""
    world = _world(_config(depth, depth, validation=ValidationPlan(num_prompts=3, every=4)), seed)
    world.run()
    versions = [result.version for result in world.controller.state.rounds_done]
    assert [version // 4 for version in versions] == [0, 1, 2, 3]
    assert (versions[0], versions[-1]) == (0, 12)


@pytest.mark.parametrize("seed", range(3))
def test_a_validation_of_several_answers_tells_their_mean_and_that_of_the_best(seed: int) -> None:
    world = _world(_config(2, 4, validation=ValidationPlan(num_prompts=50, num_samples=4)), seed)
    world.run()
    for result in world.controller.state.rounds_done:
        assert (result.count, result.num_samples) == (50, 4)
        assert 0.35 < result.mean_reward < 0.65, "of coins"
        assert 0.8 < result.best_reward <= 1.0, "1 - 2**-4 of four coins each"


def _ordinals(trained: dict[int, tuple[tuple[SampleRef, ...], ...]]) -> list[int]:
    keys = [group[0].key for groups in trained.values() for group in groups]
    return sorted(int(key.split("/")[0].split(".")[2]) for key in keys)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_resumed_from_its_cut_goes_on_with_the_same_sample_stream(seed: int) -> None:
    config = _config(2, 4, validation=ValidationPlan())
    world = _world(config, seed)
    world.later(StopRequested(reason="ctrl-c"), 20.0)
    world.run()
    stopped_at = max(world.cuts)
    resumed = World(Controller.from_cut(config, world.cuts[stopped_at]), random.Random(seed))
    resumed.join("policy-0", "policy", version=stopped_at)
    resumed.join("rollout-0", "rollout")
    resumed.run()
    trained = {**world.trained, **resumed.trained}
    assert sorted(trained) == list(range(12))
    assert len(set(_ordinals(trained))) == 48, "no prompt twice"
    assert resumed.controller.books().issued >= 48


@pytest.mark.parametrize("end", ["stopped", "killed"])
@pytest.mark.parametrize(("depth", "bound"), [(1, 2), (2, 4), (3, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_ahead_of_training_that_was_resumed_trains_on_the_prompts_of_one_that_was_not(
    end: str, depth: int, bound: int, seed: int
) -> None:
    """The same set, none twice and none left out, while replicas die and samples fail."""
    config = _config(depth, bound, max_attempts=1000)
    troubles = {"kills": 3, "failures": 0.1}
    whole, first = (_world(config, seed, **troubles) for _ in range(2))
    whole.run()
    while first.controller.state.step < 9:
        first.now, _, event = heapq.heappop(first.queue)
        first.deliver(event)
    if end == "stopped":
        first.deliver(StopRequested(reason="ctrl-c"))
        first.run()
    begun = max(first.cuts)
    assert begun == 8 if end == "killed" else begun >= 9
    before = {step: groups for step, groups in first.trained.items() if step < begun}
    resumed = World(Controller.from_cut(config, first.cuts[begun]), random.Random(100), **troubles)
    for index in range(2):
        resumed.join(f"rollout-{index}", "rollout")
    resumed.join("policy-0", "policy", version=begun)
    resumed.run()
    assert sorted(resumed.trained) == list(range(begun, 12))
    assert _ordinals({**before, **resumed.trained}) == _ordinals(whole.trained)
    assert resumed.controller.books().consumed == whole.controller.books().consumed == 48


@pytest.mark.parametrize("seed", range(4))
def test_no_attempt_at_a_prompt_is_ordered_twice_however_often_a_policy_falls_back(
    seed: int,
) -> None:
    """A replica that is asked for what it has made reports it again, but that is deleted."""
    config = _config(1, 2, validation=ValidationPlan(), max_attempts=3)
    world = _world(config, seed)
    for fallback in range(3):
        while world.controller.state.step < 6:
            world.now, _, event = heapq.heappop(world.queue)
            world.deliver(event)
        for step in [step for step in world.trained if step >= 4]:
            del world.trained[step]
        world.queue = [e for e in world.queue if getattr(e[2], "replica", "") != "policy-0"]
        heapq.heapify(world.queue)
        if not fallback:
            world.deliver(CheckpointSaved(replica="policy-0", step=3, path="x"))
        world.deliver(ReplicaLeft(replica="policy-0", reason="killed"))
        world.join("policy-0", "policy", version=4)
        while world.controller.state.step >= 6:
            world.now, _, event = heapq.heappop(world.queue)
            world.deliver(event)
    world.run()
    assert sorted(world.trained) == list(range(12))
    assert world.controller.books().dropped == {}
    assert len(world.ordered) == len(set(world.ordered)), "an attempt is ordered twice"


def test_a_policy_that_falls_back_to_a_checkpoint_has_its_lost_steps_issued_again() -> None:
    config = _config(1, 2, validation=ValidationPlan())
    world = _world(config, seed=1)
    while world.controller.state.step < 6:
        world.now, _, event = heapq.heappop(world.queue)
        world.deliver(event)
    lost = {step: world.trained.pop(step) for step in list(world.trained) if step >= 4}
    world.queue = [e for e in world.queue if getattr(e[2], "replica", "") != "policy-0"]
    heapq.heapify(world.queue)
    world.deliver(CheckpointSaved(replica="policy-0", step=3, path="x"))
    world.deliver(ReplicaLeft(replica="policy-0", reason="killed"))
    world.join("policy-0", "policy", version=4)
    world.run()
    assert sorted(world.trained) == list(range(12))
    assert lost
    assert world.controller.books().consumed == 48
