"""Ranks that write checkpoints together and are killed, run out of disk, or write to S3.

They export a model to a full disk as well.

python checkpoint_ranks.py DIRECTORY [S3]; S3 is the JSON of s3fs's settings. Each scenario writes
what it found to DIRECTORY/NAME.json, and what the ranks that were left said to NAME-RANK.txt.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import torch
from first_use import import_for_ranks
from full_disks import no_file_longer_than
from parallel_ranks import Layout, Place, build_model, make_learner, run_ranks, take_step
from torch import nn

from cosmos_parallel import (
    CheckpointError,
    CheckpointStore,
    CheckpointWriteError,
    ExportError,
    Learner,
    LearnerConfig,
    ParallelConfig,
    RetentionConfig,
    SftLoss,
    build_mesh,
    export_hf,
    shard_module,
    shutdown_distributed,
)
from cosmos_parallel.gradients import local_part

TWO = Layout(num_ranks=2)
VICTIMS = {"second": [1], "first": [0], "both": [0, 1]}
URL = "s3://bucket/run"
SAVED_AFTER = 3
_WIDTH = 400


def wide_learner(place: Place) -> Learner:
    """Return a learner of 13 MB of weights and twice as much of moments, divided by FSDP2."""
    mesh = place.mesh() if place.layout.num_ranks > 1 else build_mesh(ParallelConfig())
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(20)))
    shard_module(model, mesh, blocks=list(model))
    learner = Learner(model, LearnerConfig(), mesh=mesh)
    learner.step([torch.ones(1, _WIDTH)], lambda model, batch: SftLoss(
        total=model(batch).square().sum(), weight=torch.tensor(1.0), metrics={}
    ))  # fmt: skip
    return learner


@torch.no_grad()
def fill(learner: Learner, value: float) -> None:
    for parameter in learner.model.parameters():
        local_part(parameter).fill_(value)


def values(learner: Learner) -> list[float]:
    """Return every value that is among this rank's weights."""
    return sorted({
        value for parameter in learner.model.parameters()
        for value in local_part(parameter.detach()).unique().tolist()
    })  # fmt: skip


def save_until_killed(place: Place, directory: Path) -> None:
    """Save for ever, all weights the number of the step; say why it ended."""
    learner = wide_learner(place)
    store = CheckpointStore(directory, learner.mesh)
    step = 0
    try:
        while True:
            step += 1
            fill(learner, step)
            store.save(step, learner, str(step).encode())
    except CheckpointError as error:
        say(place, directory, error)


def say(place: Place, directory: Path, error: Exception) -> None:
    path = directory.with_name(f"{directory.name}-{place.rank}.txt")
    path.write_text(f"{type(error).__name__}: {error}")


def kill_in_mid_save(directory: Path, victims: list[int]) -> list[int]:
    """Kill ranks once the second has begun its file of a later save; return all exit codes."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as meeting:
        ranks = [
            context.Process(target=_save, args=(Place(TWO, 0, rank, Path(meeting)), directory))
            for rank in (0, 1)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + 60
        while not (any(directory.glob("step-*")) and any(directory.glob(".writing-*/__1_0*"))):
            assert all(process.is_alive() for process in ranks)
            assert time.monotonic() < end
        for victim in victims:
            ranks[victim].kill()
        for process in ranks:
            process.join(60)
            assert process.exitcode is not None, "who was left waits for who was killed"
        return [process.exitcode for process in ranks]


def _save(place: Place, directory: Path) -> None:
    torch.set_num_threads(1)
    save_until_killed(place, directory)
    shutdown_distributed()


def killed(directory: Path, name: str, victims: list[int]) -> None:
    """Kill ranks in a save, then load what is there on two ranks and on one, and save again."""
    for attempt in range(5):
        place = directory / f"{name}{attempt}"
        codes = kill_in_mid_save(place, victims)
        said = list(directory.glob(f"{place.name}-*.txt"))
        left = [each.name for each in place.glob(".writing-*")]
        if left or said:  # the kill fell into a save
            break
    found = {"codes": codes, "left": left, "said": [each.read_text() for each in said]}

    def resume(at: Place) -> None:
        learner = wide_learner(at)
        store = CheckpointStore(place, learner.mesh)
        checkpoint = store.load(learner)
        here = {"step": checkpoint.step, "extra": checkpoint.extra.decode(), "all": store.steps()}
        here |= {"values": values(learner)}
        if at.layout == TWO:
            store.save(checkpoint.step + 1, learner)
            here["after"] = sorted(each.name for each in place.iterdir())
        store.close()
        (directory / f"{name}-{at.layout}-{at.rank}.json").write_text(json.dumps(here))

    for layout in (Layout(), TWO):
        run_ranks(layout, resume)
    for each in directory.glob(f"{name}-*r1-*.json"):
        found[each.stem.removeprefix(f"{name}-")] = json.loads(each.read_text())
    (directory / f"{name}.json").write_text(json.dumps(found))


def full(directory: Path) -> None:
    """Have the disk of one of two ranks be full in a save."""
    place = directory / "full"

    def body(at: Place) -> None:
        learner = wide_learner(at)
        store = CheckpointStore(place, learner.mesh)
        store.save(1, learner)
        limit = no_file_longer_than(100_000) if at.rank == 1 else contextlib.nullcontext()
        with limit:
            try:
                store.save(2, learner)
            except CheckpointWriteError as error:
                say(at, place, error)
        found = {"steps": store.steps(), "names": sorted(each.name for each in place.iterdir())}
        store.save(3, learner)
        (directory / f"full-{at.rank}.json").write_text(json.dumps(found))
        assert store.load(learner).step == 3
        store.close()

    run_ranks(TWO, body)


def unreachable(directory: Path) -> None:
    """Have what the first of two ranks asks before a save appears be out of reach, once."""
    place = directory / "unreachable"

    def ask(extra: bytes) -> None:
        if extra == b"too early":
            raise EOFError("nobody answers")  # no OSError, as of many clients

    def body(at: Place) -> None:
        learner = wide_learner(at)
        store = CheckpointStore(place, learner.mesh, before_it_appears=ask)
        try:
            store.save(1, learner, b"too early")
        except CheckpointWriteError as error:
            say(at, place, error)
        store.save(2, learner, b"in time")
        found = {"steps": store.steps(), "step": store.load(learner).step}
        (directory / f"unreachable-{at.rank}.json").write_text(json.dumps(found))
        store.close()

    run_ranks(TWO, body)


def unlike(directory: Path) -> None:
    """Have the second of two ranks see another checkpoint than the first, a damaged one, and none.

    Each looks at a folder of its own, as file systems of two machines may show them the same place.
    """
    place = directory / "unlike"

    def body(at: Place) -> None:
        learner = wide_learner(at)
        whole = CheckpointStore(place, learner.mesh, retention=RetentionConfig(keep=3))
        for step in (1, 2):
            fill(learner, step)
            whole.save(step, learner, str(step).encode())
        seen = directory / f"unlike-seen-{at.rank}"
        shutil.copytree(place, seen)
        store = CheckpointStore(seen, learner.mesh)
        said: list[str] = []
        newest = seen / "step-00000002"

        def say_of(find: Callable[[], int | None]) -> None:
            try:
                said.append(f"step {find()}")
            except CheckpointError as error:
                said.append(str(error).replace(str(directory), ""))

        def load() -> None:
            say_of(lambda: store.load(learner).step)
            say_of(store.latest_of_all)

        if at.rank == 1:
            shutil.move(newest, directory / "away")
        load()
        if at.rank == 1:
            shutil.move(directory / "away", newest)
            (newest / "manifest.json").write_text("{")
        load()
        if at.rank == 1:
            shutil.copy(place / newest.name / "manifest.json", newest)
        load()
        if at.rank == 0:
            (newest / "manifest.json").write_text("{")
        load()
        found = {"said": said, "values": values(learner)}
        (directory / f"unlike-{at.rank}.json").write_text(json.dumps(found))
        store.close()
        whole.close()

    run_ranks(TWO, body)


def export_to_full(directory: Path) -> None:
    """Have the disk of the first of two ranks, which writes an export, be full."""
    place = directory / "exported"

    def body(at: Place) -> None:
        mesh, learner = make_learner(at, directory)
        limit = no_file_longer_than(600) if at.rank == 0 else contextlib.nullcontext()
        with limit:
            try:
                export_hf(learner.model, place, mesh)
            except ExportError as error:
                say(at, place, error)
        export_hf(learner.model, place, mesh)

    run_ranks(TWO, body)


def train_to_s3(place: Place, directory: Path) -> None:
    """Save a step, take two more, and die before what is saved then is whole."""

    def die(extra: bytes) -> None:
        if extra == b"killed":
            os.kill(os.getpid(), signal.SIGKILL)

    mesh, learner = make_learner(place, directory)
    store = CheckpointStore(URL, mesh, before_it_appears=die)
    for step in range(SAVED_AFTER):
        take_step(learner, place, step)
    store.save(SAVED_AFTER, learner, b"cut")
    reports = [take_step(learner, place, step) for step in (3, 4)]
    if place.rank == 0:
        (directory / "s3-trained.json").write_text(json.dumps(reports))
    try:
        store.save(5, learner, b"killed")
    except CheckpointWriteError as error:
        say(place, directory / "s3", error)


def resume_from_s3(place: Place, directory: Path) -> None:
    mesh, learner = make_learner(place, directory, seed_weights=0.1)
    store = CheckpointStore(URL, mesh)
    checkpoint = store.load(learner)
    reports = [take_step(learner, place, step) for step in (3, 4)]
    found = {"step": checkpoint.step, "extra": checkpoint.extra.decode(), "reports": reports}
    if place.rank == 0:
        (directory / f"s3-{place.layout}.json").write_text(json.dumps(found))
    if place.layout == TWO:
        store.save(5, learner, b"whole")
    store.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    import_for_ranks()
    for who, ranks in VICTIMS.items():
        killed(where, who, ranks)
    full(where)
    unreachable(where)
    unlike(where)
    if len(sys.argv) > 2:
        fsspec.config.conf["s3"] = json.loads(sys.argv[2])
        build_model("qwen3", where, tied=True)
        export_to_full(where)
        with contextlib.suppress(SystemExit):  # one of them has killed itself
            run_ranks(TWO, lambda at: train_to_s3(at, where))
        for resuming in (Layout(), TWO):
            run_ranks(resuming, lambda at: resume_from_s3(at, where))
