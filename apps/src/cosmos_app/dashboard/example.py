"""A small recorded run, made up, to look at the dashboard without running anything.

Thirty steps of two seconds: one learner that trains for a second of each, two engines that decode
for three quarters of it, and samples over which weights changed::

    from cosmos_app.dashboard.example import write_example_run
    write_example_run(Path("runs/example"))      # cosmos-app replay runs/example
"""

import json
from pathlib import Path

import msgspec

from cosmos_app.event_log import EventLog
from cosmos_app.shown_samples import ShownSample
from cosmos_core.bus import Dispatch
from cosmos_core.messages import (
    CheckpointSaved,
    Event,
    GroupFinished,
    GroupId,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    StepFinished,
    Train,
    VersionLoaded,
)
from cosmos_core.metrics import JsonlSink, MetricRecord
from cosmos_core.rundir import RunDirectory, write_atomic

START_S = 1_800_000_000.0
STEP_S = 2.0
_ROLLOUTS = ("rollout-0", "rollout-1")
# a red square of 8 pixels, as PNG
_PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFUlEQVR42mO8o6HBgA0wMeAAg1MCAO/E"
    "ATxlNiNaAAAAAElFTkSuQmCC"
)


def write_example_run(path: Path, *, num_steps: int = 30) -> None:
    """Write the directory of a run that is over.

    Raises:
        RunExistsError: if something is there already.
    """
    with RunDirectory.create(path, config_json='{"kind": "rl"}\n', now_s=START_S) as run:
        sink, log = JsonlSink(run.metrics), EventLog(run.path / "events.jsonl")
        _note(log, START_S, *_joins())
        for step in range(num_steps):
            now_s = START_S + STEP_S * (step + 1)
            for record in _records(step, now_s):
                sink.write(record)
            _note_step(log, step, now_s)
        _note(
            log,
            START_S + STEP_S * num_steps,
            CheckpointSaved(replica="policy-0", step=num_steps - 1, path="checkpoints"),
            ReplicaLeft(replica="rollout-1", reason="signal 9 (SIGKILL)"),
        )
        sink.close()
        _write_samples(run.path / "samples", num_steps)
        write_atomic(run.report, json.dumps(_report(num_steps), indent=2))


def _joins() -> list[Event]:
    policy = ReplicaJoined(replica="policy-0", role="policy")
    rollouts = [ReplicaJoined(replica=name, role="rollout", slots=4) for name in _ROLLOUTS]
    return [policy, *rollouts]


def _records(step: int, now_s: float) -> list[MetricRecord]:
    reward = 0.2 + 0.02 * step
    staleness = {"staleness_mean": min(step, 1.5), "staleness_max": float(min(step, 2))}
    queues = {"queue_waiting": 1.0, "queue_generating": 6.0, "queue_ready": 2.0}
    rollout = {
        "decoding_share": 0.75,
        "waiting_for_rewards_share": 0.15,
        "paused_for_weights_share": 0.05,
        "gated_staleness_share": 0.03,
        "idle_share": 0.05,
        "tokens_per_s": 400.0 + step,
    }
    policy = {"train_s": 1.0, "num_samples": 64.0, "loss": 0.01, "idle_share": 0.5}
    policy |= {"publish_s": 0.004, "publications_skipped": float(step % 10 == 9)}
    policy |= {"optim_s": 0.1, "wait_s": 0.8 if step else 0.3}
    policy |= {"save_s": 0.1} if step % 10 == 1 else {}
    policy |= {"validate_s": 0.2} if step == 0 else {}
    controller = {"reward": reward, **staleness, **queues}
    load = {"stall_s": 0.02 + 0.001 * step, "transfer_s": 0.1, "served_s": 0.25}
    return [
        *(MetricRecord(now_s, "rollout", name, step, rollout) for name in _ROLLOUTS),
        *(MetricRecord(now_s, "rollout", name, step + 1, load) for name in _ROLLOUTS),
        MetricRecord(now_s, "policy", "policy-0", step, policy),
        MetricRecord(now_s, "controller", "controller", step, controller),
    ]


def _note(log: EventLog, time_s: float, *events: Event) -> None:
    log.note(time_s=time_s, epoch=1, events=events, dispatches=())


def _note_step(log: EventLog, step: int, now_s: float) -> None:
    sample = SampleRef(
        sibling=0, status="completed", key="k", num_tokens=5, reward=1.0, oldest_version=step
    )
    train = Train(step=step, groups=((sample,),), publish=True)
    finished = GroupFinished(
        replica="rollout-0", group=GroupId("train", 0, step), attempt=0, samples=(sample,)
    )
    order = Dispatch(replica="policy-0", incarnation="1", command=train)
    log.note(time_s=now_s - 1.0, epoch=1, events=[finished], dispatches=[order])
    _note(log, now_s, StepFinished(replica="policy-0", step=step))
    for name in _ROLLOUTS:
        loaded = VersionLoaded(replica=name, version=step + 1, transfer_s=0.1, stall_s=0.02)
        _note(log, now_s, loaded)


def _write_samples(folder: Path, num_steps: int) -> None:
    folder.mkdir()
    lines = [
        ShownSample(
            time_s=START_S + STEP_S * (step + 1),
            replica="rollout-0",
            group=f"train.0.{step}",
            reward=float(step % 2),
            finish_reason="stop",
            spans=(
                (-1, 6, "What is 12 + 30? "),
                (step, 4, "12 and 30 are "),
                (step + 1, 2, "42. <b>Sure.</b>"),
            ),
            images=(_PICTURE,) if step % 2 else (),
        )
        for step in range(num_steps)
    ]
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    write_atomic(folder / "shown-rollout-0.jsonl", data)


def _report(num_steps: int) -> dict[str, object]:
    return {
        "finished": "all steps done",
        "steps": num_steps,
        "accuracies": {"0": 0.25, str(num_steps): 0.8},
        "data_sets": {
            "code": {"0": 0.2, str(num_steps): 0.7},
            "sums": {"0": 0.95, str(num_steps): 0.9},
        },
        "books": {
            "issued": 8 * num_steps + 1,
            "consumed": 8 * num_steps,
            "dropped": {"too stale": 1},
            "in_flight": {"waiting": 0, "generating": 0, "ready": 0, "training": 0},
        },
    }
