"""The arms of the bubble benchmark: one workload, several ways to keep both sides busy.

All arms have the same devices: two engines and a learner that keeps up with both, 2 % slower than
they are, or, colocated, four engines and a learner twice as fast, one after the other. A push takes
a quarter of a second; colocated devices switch between the two sides in half of that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cosmos_core.control import ControllerConfig, StalenessConfig
from cosmos_core.control.config import StalenessName
from cosmos_core.simulation import (
    Capacity,
    EngineSpeed,
    LengthConfig,
    SystemConfig,
    generate_bound_s,
    step_bound_s,
)

GROUPS, SAMPLES = 12, 4
SPEED = EngineSpeed(fixed_s=4e-3, request_s=0.5e-3, max_running=8)
LENGTHS = LengthConfig(median=32.0, sigma=0.7, longest=256)
LEARNER_SLOWER = 1.02
PUSH_S = 0.25
SWAP_S, SNAPSHOT_S, FETCH_S, MESSAGE_S, SCORE_S = 1e-3, 1e-3, 4e-3, 4e-3, 10e-3
"""What the simulator is told of a run's smaller delays: medians, measured once on two cores.

Swap, snapshot and fetch are single spans; two messages and a fetch lie between two steps, where
there are samples.
"""
SPANS = "spans"
"""Folder of a run in which everybody writes what it did when."""
LEASE_S = 30.0
MORE_SLOTS, MOST_SLOTS = 9, 12
"""Of engines whose samples are away with their environment for some of their time."""
SYNC_COLOCATED, SYNC, DEFAULT = "sync, colocated", "sync, disaggregated", "depth 2, bound 4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to run the workload.

    Attributes:
        name: in tables.
        control: what the controller is told.
        system: what the replicas take.
        bound_s: least seconds of a step on the devices of the disaggregated arms.
        skip: steps at the start that are not measured.
    """

    name: str
    control: ControllerConfig
    system: SystemConfig
    bound_s: float
    skip: int

    @property
    def capacity(self) -> Capacity:
        """What its engines could do at best."""
        speed = self.system.speed
        return Capacity(
            rollouts=self.system.rollouts,
            tokens_per_s=speed.full_rate,
            max_running=speed.max_running,
        )


def control(
    depth: int, bound: int, policy: StalenessName = "block", *, groups: int = GROUPS
) -> ControllerConfig:
    """Return a run that has no end of its own."""
    return ControllerConfig(
        num_steps=1_000_000,
        groups_per_step=groups,
        samples_per_group=SAMPLES,
        staleness=StalenessConfig(depth=depth, bound=bound, policy=policy),
        lease_s=LEASE_S,
        first_lease_s=10 * LEASE_S,
    )


def sized(*, rollouts: int, groups: int, lengths: LengthConfig = LENGTHS) -> SystemConfig:
    """Return that many engines and a learner to match, for steps of so many groups."""
    system = SystemConfig(
        rollouts=rollouts,
        slots=GROUPS // 2,
        speed=SPEED,
        lengths=lengths,
        push_s=PUSH_S,
        swap_s=SWAP_S,
        snapshot_s=SNAPSHOT_S,
        fetch_s=FETCH_S,
        message_s=MESSAGE_S,
        score_s=SCORE_S,
    )
    generate_s = generate_bound_s(control(2, 4, groups=groups), system)
    return replace(system, train_s=LEARNER_SLOWER * generate_s)


def arms(seed: int, environment_s: float = 0.0) -> Mapping[str, Arm]:
    """Return the arms with the lengths of a seed, by name.

    With an environment that takes so long they are those that have one.
    """
    lengths = replace(LENGTHS, seed=seed)
    system = sized(rollouts=2, groups=GROUPS, lengths=lengths)
    blocking = replace(system, push="blocking")
    colocated = replace(
        blocking,
        rollouts=2 * system.rollouts,
        train_s=system.train_s / 2,
        push_s=PUSH_S / 2,
    )
    bound_s = step_bound_s(control(2, 4), system)

    def arm(name: str, told: ControllerConfig, around: SystemConfig) -> Arm:
        skip = 1 if told.staleness.depth == 0 else 3
        return Arm(name=name, control=told, system=around, bound_s=bound_s, skip=skip)

    if environment_s:
        slow = replace(system, environment_s=environment_s)
        more, most = replace(slow, slots=MORE_SLOTS), replace(slow, slots=MOST_SLOTS)
        end = f"environment {environment_s:g} s"
        of_an_environment = (
            arm(f"{DEFAULT}, {end}", control(2, 4), slow),
            arm(f"{DEFAULT}, {MORE_SLOTS} slots, {end}", control(2, 4), more),
            arm(f"depth 3, bound 6, {MOST_SLOTS} slots, {end}", control(3, 6), most),
        )
        return {made.name: made for made in of_an_environment}
    return {
        made.name: made
        for made in (
            arm(SYNC_COLOCATED, control(0, 0), colocated),
            arm(SYNC, control(0, 0), blocking),
            arm("one step off", control(1, 1), blocking),
            arm("count, depth 2", control(2, 4, "count"), system),
            arm("window 0.3, depth 2", control(2, 4, "window"), system),
            arm("drop, bound 2", control(2, 2, "drop"), system),
            arm("block, bound 2", control(2, 2), system),
            arm(f"{DEFAULT}, blocking push", control(2, 4), blocking),
            arm(DEFAULT, control(2, 4), system),
        )
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker process is told of one run.

    Attributes:
        run_dir: its directory.
        files_dir: where prompts and model lie.
        recipe: what the role processes read, as JSON.
        system: what the replicas take.
    """

    run_dir: str
    files_dir: str
    recipe: str
    system: SystemConfig
