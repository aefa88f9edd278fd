"""Events per second that one core of the controller takes in: `python benchmarks/controller.py`.

Measures `Controller.handle` alone, decisions and books and all, in a simulated world of rollout
replicas that answer every command at once. Seconds are those of the process, so that whatever else
a busy machine does is not counted. With ``--validation N`` the first version and every second one
are validated by N prompts. With ``--live N`` a real controller, a real Redis and N replicas
with connections of their own are measured instead, by the clock. Figures: RESULTS.md.
"""

import argparse
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import psutil
from controller_live import show_live

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig, ValidationPlan
from cosmos_core.messages import (
    Event,
    Generate,
    GroupFinished,
    LoadVersion,
    Progress,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    Tick,
    Train,
    VersionLoaded,
    VersionPublished,
)


def answer(name: str, command: object) -> list[Event]:
    match command:
        case Generate():
            samples = tuple(
                SampleRef(
                    sibling=sibling,
                    status="completed",
                    key=f"{command.group}/{sibling}",
                    num_tokens=100,
                    reward=float(sibling),
                    oldest_version=command.attempt,
                    newest_version=command.attempt,
                )
                for sibling in range(command.num_samples)
            )
            finished = GroupFinished(
                replica=name, group=command.group, attempt=command.attempt, samples=samples
            )
            return [Progress(replica=name, count=1), finished]
        case LoadVersion():
            return [
                VersionLoaded(replica=name, version=command.version, transfer_s=0.1, stall_s=0.0)
            ]
        case Train():
            return [
                StepFinished(replica=name, step=command.step),
                VersionPublished(replica=name, version=command.step + 1),
            ]
        case _:
            return []


def current(event: Event, versions: dict[str, int]) -> Event:
    """Say that the samples are of the version that their replica holds."""
    if not isinstance(event, GroupFinished):
        return event
    version = versions.get(event.replica, 0)
    samples = tuple(
        SampleRef(
            sibling=s.sibling,
            status=s.status,
            key=s.key,
            num_tokens=s.num_tokens,
            reward=s.reward,
            oldest_version=version,
            newest_version=version,
        )
        for s in event.samples
    )
    return GroupFinished(
        replica=event.replica, group=event.group, attempt=event.attempt, samples=samples
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one run of the simulated world took.

    Attributes:
        events: taken in.
        events_per_s: of the process's own seconds.
        p50_us: of the process's own time for one event.
        p99_us: the same, 99 of 100 are quicker.
        longest_ms: the slowest event of all.
        longest_tick_ms: the slowest look at all leases.
        rss_mib: by which the process had grown, the world's own queue of events included.
        state_mib: size of the controller's whole state, written down.
    """

    events: int
    events_per_s: float
    p50_us: float
    p99_us: float
    longest_ms: float
    longest_tick_ms: float
    rss_mib: float
    state_mib: float


def run(num_replicas: int, slots: int, num_steps: int, held_out: int) -> Measured:
    """Run some steps of the simulated world; seconds are CPU time of this process."""
    groups_per_step = num_replicas * slots // 2
    config = ControllerConfig(
        num_steps=num_steps,
        groups_per_step=groups_per_step,
        samples_per_group=8,
        staleness=StalenessConfig(depth=2, bound=4),
        validation=ValidationPlan(num_prompts=held_out, every=2, after=False),
    )
    before, largest_state = psutil.Process().memory_info().rss, 0
    controller = Controller(config)
    events: deque[Event] = deque(
        ReplicaJoined(replica=f"rollout-{i}", role="rollout", slots=slots)
        for i in range(num_replicas)
    )
    events.appendleft(ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",)))
    versions: dict[str, int] = {}
    spent_s, longest_tick_s, now = array("d"), 0.0, 0.0
    while events and controller.state.step < num_steps:
        event = current(events.popleft(), versions)
        if isinstance(event, VersionLoaded):
            versions[event.replica] = event.version
        if len(spent_s) % 5000 == 0:
            events.append(Tick())
        if len(spent_s) % 50_000 == 20_000:
            largest_state = max(largest_state, len(controller.snapshot()))
        now += 1e-4
        started = time.process_time()
        commands = controller.handle(event, now)
        spent_s.append(time.process_time() - started)
        if isinstance(event, Tick):
            longest_tick_s = max(longest_tick_s, spent_s[-1])
        controller.take_garbage()
        for name, command in commands:
            events.extend(answer(name, command))
    assert controller.state.step == num_steps
    rss = psutil.Process().memory_info().rss - before
    ordered = sorted(spent_s)
    return Measured(
        events=len(ordered),
        events_per_s=len(ordered) / sum(ordered),
        p50_us=1e6 * ordered[len(ordered) // 2],
        p99_us=1e6 * ordered[int(0.99 * len(ordered))],
        longest_ms=1e3 * ordered[-1],
        longest_tick_ms=1e3 * longest_tick_s,
        rss_mib=rss / 2**20,
        state_mib=max(largest_state, len(controller.snapshot())) / 2**20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--validation", type=int, default=0, help="held-out prompts")
    parser.add_argument("--live", type=int, help="so many replicas with connections to a Redis")
    parser.add_argument("--seconds", type=float, default=20.0, help="of --live")
    parser.add_argument("--json", type=Path, help="write the figures of --live here")
    options = parser.parse_args()
    if options.live:
        show_live(options.live, options.seconds, options.json)
        return
    print(
        "| rollout replicas | slots each | groups a step | events | events/s | p50 us | p99 us "
        "| longest ms | longest tick ms | memory MiB | state MiB |\n" + "|---" * 11 + "|"
    )
    for replicas, slots in ((10, 32), (100, 32), (1000, 8), (10_000, 4)):
        found = run(replicas, slots, options.steps, options.validation)
        print(
            f"| {replicas} | {slots} | {replicas * slots // 2} | {found.events} "
            f"| {found.events_per_s:,.0f} | {found.p50_us:.0f} | {found.p99_us:.0f} "
            f"| {found.longest_ms:.1f} | {found.longest_tick_ms:.1f} | {found.rss_mib:.0f} "
            f"| {found.state_mib:.1f} |"
        )


if __name__ == "__main__":
    main()
