"""Events per second that one core of the controller takes in: `python benchmarks/controller.py`.

Measures `Controller.handle` alone, decisions and books and all, in a simulated world of rollout
replicas that answer every command at once. Seconds are those of the process, so that whatever else
a busy machine does is not counted. On 2 shared cores, November 2026:

    replicas   slots   groups a step     events   events/s   longest tick
          10      32             160      1,319     26,900         0.2 ms
         100      32           1,600     13,111     24,800         0.3 ms
       1,000       8           4,000     35,015     22,500         0.7 ms
      10,000       4          20,000    140,033     23,300         8.8 ms   (3 steps)
"""

import argparse
import time
from collections import deque

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig
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


def run(num_replicas: int, slots: int, num_steps: int) -> tuple[int, float, float]:
    """Return events, events per second of CPU time, and the longest tick in ms."""
    groups_per_step = num_replicas * slots // 2
    config = ControllerConfig(
        num_steps=num_steps,
        groups_per_step=groups_per_step,
        samples_per_group=8,
        staleness=StalenessConfig(depth=2, bound=4),
    )
    controller = Controller(config)
    events: deque[Event] = deque(
        ReplicaJoined(replica=f"rollout-{i}", role="rollout", slots=slots)
        for i in range(num_replicas)
    )
    events.appendleft(ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",)))
    versions: dict[str, int] = {}
    count, busy_s, longest_tick_s, now = 0, 0.0, 0.0, 0.0
    while events and controller.state.step < num_steps:
        event = current(events.popleft(), versions)
        if isinstance(event, VersionLoaded):
            versions[event.replica] = event.version
        if count % 5000 == 0:
            events.append(Tick())
        now += 1e-4
        started = time.process_time()
        commands = controller.handle(event, now)
        spent = time.process_time() - started
        busy_s += spent
        count += 1
        if isinstance(event, Tick):
            longest_tick_s = max(longest_tick_s, spent)
        controller.take_garbage()
        for name, command in commands:
            events.extend(answer(name, command))
    assert controller.state.step == num_steps
    return count, count / busy_s, 1e3 * longest_tick_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    print("| rollout replicas | slots each | groups a step | events | events/s | longest tick ms |")
    print("|---|---|---|---|---|---|")
    for replicas, slots in ((10, 32), (100, 32), (1000, 8), (10_000, 4)):
        count, rate, tick_ms = run(replicas, slots, steps)
        print(
            f"| {replicas} | {slots} | {replicas * slots // 2} | {count} | {rate:,.0f} "
            f"| {tick_ms:.1f} |"
        )


if __name__ == "__main__":
    main()
