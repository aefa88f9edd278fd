"""Replicas that come and go: one process imports torch once and forks all others.

python elastic_replicas.py DIRECTORY RANKS; writes what each replica saw to DIRECTORY/NAME.json.

One run goes through all that can happen, in the order of steps:

policy-0   0 ... kills itself in the middle of step 6
policy-1   0 ... goes on alone                ... is stopped, and wakes after its lease
policy-2         joins after the death of policy-0 ... goes on alone, then both
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.distributed  # noqa: F401  (imported once, before the forks)
from parallel_ranks import build_model, full, micro_batches, next_token_loss
from torchft import coordination  # noqa: F401  (imported once, before the forks)

from cosmos_parallel import (
    AdamWConfig,
    ElasticConfig,
    ElasticReplicas,
    Learner,
    LearnerConfig,
    Meeting,
    MeetingPlace,
    ParallelConfig,
    ProcessContext,
    ReplicaLostError,
    ScheduleConfig,
    build_mesh,
    init_distributed,
    load_causal_lm,
    open_meeting_store,
    shutdown_distributed,
)

CONFIG = ElasticConfig(lease_s=3.0, join_s=60.0, timeout_s=90.0)
DIES_AT, STEPS_TOGETHER, MOST_STEPS = 6, 4, 400
FORKING = multiprocessing.get_context("fork")
Act = Callable[[Path, str, str, ProcessContext], None]


def make_learner(directory: Path, mesh) -> Learner:
    model = load_causal_lm(directory / "qwen3", mesh)
    schedule = ScheduleConfig(shape="linear", num_warmup_steps=5, num_steps=MOST_STEPS)
    optimizer = AdamWConfig(lr=1e-3, schedule=schedule)
    return Learner(model, LearnerConfig(optimizer=optimizer), mesh=mesh)


class Replica:
    """One rank of one replica; writes a line for each step that was taken or lost."""

    config = CONFIG
    dies_at = DIES_AT

    def __init__(self, directory: Path, address: str, name: str, place: ProcessContext) -> None:
        self.directory, self.name, self.place = directory, name, place
        self.mesh = build_mesh(ParallelConfig(), place)
        self.learner = make_learner(directory, self.mesh)
        meeting = Meeting(address, name, self.config) if place.rank == 0 else None
        store = open_meeting_store(address, self.config)
        self.replicas = ElasticReplicas(meeting, store, self.mesh, self.config)
        self.lines: list[dict] = []

    def run(self) -> None:
        step, together = 0, 0
        for _ in range(MOST_STEPS):
            stop = together >= STEPS_TOGETHER and self.ended("policy-1", "slept")
            seat = self.replicas.meet(self.learner, step, wants_stop=stop)
            step = seat.step
            if seat.wants_stop:
                break
            begun = time.monotonic()
            try:
                report = self.learner.step(
                    self.share(seat), self.loss(step), filler=micro_batches(99)[2]
                )
            except ReplicaLostError as error:
                self.replicas.lose()
                self.note(step=step, lost=list(error.missing), names=seat.names,
                          seconds=time.monotonic() - begun, at_s=time.monotonic())  # fmt: skip
                continue
            self.note(step=step, loss=report.loss, lr=report.lr, names=seat.names,
                      healed_by=seat.healed_by, at_s=time.monotonic())  # fmt: skip
            together = together + 1 if len(seat.names) == 2 else 0
            step += 1
            time.sleep(0.01)
        weights = {name: full(value) for name, value in self.learner.model.named_parameters()}
        if self.place.rank == 0:
            torch.save((step, weights), self.directory / f"{self.name}.pt")
        self.replicas.close()

    def share(self, seat) -> list:
        index = seat.index * self.place.world_size + self.place.rank
        return micro_batches(step=seat.step)[index :: seat.size * self.place.world_size]

    def loss(self, step: int):
        def in_mid_step(model, batch):
            result = next_token_loss(model, batch)
            if self.name == "policy-0" and step == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return in_mid_step

    def note(self, **line) -> None:
        self.lines.append(line)
        if self.place.rank == 0:
            path = self.directory / f"{self.name}.json"
            path.with_suffix(".new").write_text(json.dumps(self.lines))
            path.with_suffix(".new").replace(path)

    def ended(self, name: str, what: str) -> bool:
        return (self.directory / f"{name}.{what}").exists()


def replica(directory: Path, address: str, name: str, place: ProcessContext) -> None:
    Replica(directory, address, name, place).run()


def run_rank(
    act: Act, directory: Path, address: str, name: str, rank: int, size: int, meeting: str
) -> None:
    torch.set_num_threads(1)
    try:
        place = ProcessContext()
        if size > 1:
            place = init_distributed(rank, size, init_method=f"file://{meeting}", timeout_s=90)
        act(directory, address, name, place)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        shutdown_distributed()


class Fleet:
    """Replicas of so many ranks, forked here, around a meeting place that is forked as well."""

    def __init__(self, act: Act, directory: Path, size: int, config: ElasticConfig) -> None:
        self.act, self.directory, self.size = act, directory, size
        self.hosting = FORKING.Process(target=host, args=(directory, config))
        self.ranks: dict[str, list] = {}

    def __enter__(self):
        self.hosting.start()
        try:
            wait_for((self.directory / "address").exists, "the meeting place")
        except BaseException:
            self.hosting.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [self.hosting, *(p for ranks in self.ranks.values() for p in ranks)]:
            process.kill()

    def start(self, *names: str) -> None:
        address = (self.directory / "address").read_text()
        for name in names:
            meeting = tempfile.mktemp(dir=self.directory)
            where = (self.directory, address, name)
            self.ranks[name] = [
                FORKING.Process(target=run_rank, args=(self.act, *where, rank, self.size, meeting))
                for rank in range(self.size)
            ]
            for process in self.ranks[name]:
                process.start()

    def end_after_a_death(self, name: str) -> None:
        """End a replica once a rank of it is dead, as torchrun does."""
        ranks = self.ranks[name]
        wait_for(lambda: not all(one.is_alive() for one in ranks), f"the death of {name}")
        for process in ranks:
            process.kill()

    def join(self, *names: str, timeout_s: float) -> None:
        for name in names:
            for process in self.ranks[name]:
                process.join(timeout_s)
                assert process.exitcode == 0, (name, process.exitcode)


def host(directory: Path, config: ElasticConfig) -> None:
    place = MeetingPlace(config)
    (directory / "address.new").write_text(place.address)
    (directory / "address.new").replace(directory / "address")
    time.sleep(600)


def lines_of(directory: Path, name: str) -> list[dict]:
    path = directory / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not happen")
        time.sleep(0.02)


def together(directory: Path, name: str, other: str, steps: int = 3) -> bool:
    tail = lines_of(directory, name)[-steps:]
    return len(tail) == steps and all("loss" in x and other in x["names"] for x in tail)


def alone(directory: Path, name: str) -> bool:
    tail = lines_of(directory, name)[-3:]
    return len(tail) == 3 and all("loss" in x and x["names"] == [name] for x in tail)


def elastic_run(directory: Path, size: int) -> None:
    """Start and stop replicas as the module says."""
    with Fleet(replica, directory, size, CONFIG) as fleet:
        fleet.start("policy-0", "policy-1")
        fleet.end_after_a_death("policy-0")
        wait_for(lambda: alone(directory, "policy-1"), "policy-1 going on alone")
        fleet.start("policy-2")
        wait_for(lambda: together(directory, "policy-1", "policy-2"), "policy-2 joining")
        for process in fleet.ranks["policy-1"]:
            os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: alone(directory, "policy-2"), "policy-2 going on alone")
        for process in fleet.ranks["policy-1"]:
            os.kill(process.pid, signal.SIGCONT)
        (directory / "policy-1.slept").touch()
        fleet.join("policy-1", "policy-2", timeout_s=120)


def fixed_run(directory: Path) -> None:
    """Take the same steps in one process that nobody joins or leaves."""
    last, _ = torch.load(directory / "policy-1.pt")
    learner = make_learner(directory, build_mesh(ParallelConfig()))
    reports = [learner.step(micro_batches(step), next_token_loss) for step in range(last)]
    weights = {name: full(value) for name, value in learner.model.named_parameters()}
    torch.save(([(r.loss, r.lr) for r in reports], weights), directory / "fixed.pt")


if __name__ == "__main__":
    where, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    build_model("qwen3", where, tied=True)
    elastic_run(where, num_ranks)
    assert not dist.is_initialized()
    torch.set_num_threads(1)
    fixed_run(where)
