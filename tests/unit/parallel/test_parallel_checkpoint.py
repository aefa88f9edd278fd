"""Checkpoints of one process: same next step, whole or not at all, and errors that say why."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from full_disks import no_file_longer_than
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    CheckpointError,
    CheckpointStore,
    CheckpointWriteError,
    EmaConfig,
    Learner,
    LearnerConfig,
    ParallelConfig,
    ProcessContext,
    RetentionConfig,
    ScheduleConfig,
    SftLoss,
    SgdConfig,
    build_mesh,
)


def make_learner(seed: int = 0, width: int = 4, optimizer=None) -> Learner:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    schedule = ScheduleConfig(shape="linear", num_warmup_steps=2, num_steps=10)
    optimizer = optimizer or AdamWConfig(lr=0.01, schedule=schedule)
    return Learner(model, LearnerConfig(optimizer=optimizer))


def loss(model: nn.Module, batch: torch.Tensor) -> SftLoss:
    return SftLoss(total=model(batch).square().sum(), weight=torch.tensor(1.0), metrics={})


def train(learner: Learner, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        losses.append(learner.step([batch], loss).loss)
    return losses


@pytest.fixture
def mesh():
    return build_mesh(ParallelConfig())


@pytest.fixture
def store(tmp_path, mesh):
    store = CheckpointStore(tmp_path / "checkpoints", mesh)
    yield store
    store.close()


@pytest.mark.parametrize("optimizer", [None, SgdConfig(momentum=0.9), SgdConfig()])
@pytest.mark.parametrize("saved_after", [0, 4])
def test_a_resumed_learner_takes_the_same_steps_bitwise(store, optimizer, saved_after):
    learner = make_learner(optimizer=optimizer)
    train(learner, 0, saved_after)
    store.save(saved_after, learner, b"cut")
    expected = train(learner, saved_after, saved_after + 3)
    resumed = make_learner(seed=1, optimizer=optimizer)
    train(resumed, 50, 51)
    checkpoint = store.load(resumed)
    assert (checkpoint.step, checkpoint.extra) == (saved_after, b"cut")
    assert train(resumed, saved_after, saved_after + 3) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [AdamWConfig(lr=0.01), SgdConfig(momentum=0.9)])
def test_a_learner_resumed_on_a_device_takes_the_same_steps(tmp_path, optimizer):
    place = ProcessContext(device=torch.device("cuda"))
    store = CheckpointStore(tmp_path, build_mesh(ParallelConfig(), place))

    def on_device(seed: int) -> Learner:
        model = make_learner(seed).model.cuda()
        mesh = build_mesh(ParallelConfig(), place)
        return Learner(model, LearnerConfig(optimizer=optimizer), mesh=mesh)

    def steps(learner: Learner, first: int) -> list[float]:
        batches = [torch.ones(5, 3, device="cuda") * step for step in range(first, first + 3)]
        return [learner.step([batch], loss).loss for batch in batches]

    learner, resumed = on_device(0), on_device(1)
    steps(learner, 0)
    store.save(3, learner)
    expected = steps(learner, 3)
    store.load(resumed)
    assert steps(resumed, 3) == pytest.approx(expected)
    store.close()


def test_averages_of_the_weights_go_on_or_begin_at_the_checkpoint(store):
    def averaging(seed: int) -> Learner:
        model = make_learner(seed).model
        return Learner(model, LearnerConfig(ema=EmaConfig(decay=0.5)))

    learner = averaging(0)
    train(learner, 0, 3)
    store.save(3, learner)
    resumed = averaging(1)
    store.load(resumed)
    for name, value in learner.ema.averages.items():
        assert torch.equal(resumed.ema.averages[name], value)
        assert not torch.equal(value, learner.model.get_parameter(name))
    plain = make_learner()
    train(plain, 0, 3)
    store.save(4, plain)
    store.load(resumed)
    for name, value in resumed.ema.averages.items():
        assert torch.equal(value, plain.model.get_parameter(name))


def test_the_random_stream_goes_on(store):
    learner = make_learner()
    store.save(1, learner)
    expected = torch.rand(3)
    torch.manual_seed(77)
    store.load(make_learner(seed=5), 1)
    assert torch.equal(torch.rand(3), expected)


def test_a_background_save_has_the_state_of_when_it_was_started(store):
    learner = make_learner()
    train(learner, 0, 2)
    store.start_save(2, learner)
    expected = train(learner, 2, 4)
    assert store.wait() == store.path(2)
    assert store.wait() is None
    resumed = make_learner(seed=1)
    store.load(resumed, 2)
    assert train(resumed, 2, 4) == expected


def test_only_the_newest_stay(store):
    learner = make_learner()
    for step in (1, 2, 3, 12):
        store.save(step, learner)
    assert store.steps() == [3, 12]
    assert store.latest() == 12


def test_a_run_that_has_gone_back_to_its_best_keeps_what_it_saves(tmp_path, mesh):
    store = CheckpointStore(tmp_path, mesh, retention=RetentionConfig(keep=1, keep_best=1))
    learner = make_learner()
    for step, score in ((10, 1.0), (20, 2.0), (30, 3.0)):
        store.save(step, learner, score=score)
    assert store.load(learner, store.best()).step == 10
    for step in (11, 12):
        assert Path(store.save(step, learner, score=4.0)).is_dir()
        assert store.latest() == step
    assert store.steps() == [10, 12]
    store.close()


def test_a_run_that_has_gone_back_goes_on_from_what_it_saved_since(store, mesh):
    learner = make_learner()
    for step in (10, 20):
        store.save(step, learner)
        manifest = Path(store.path(step)) / "manifest.json"
        written = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({k: v for k, v in written.items() if k != "order"}))
    assert store.latest() == 20  # of an earlier version
    store.load(learner, 10)
    store.save(15, learner, b"since")
    again = CheckpointStore(Path(store.path(15)).parent, mesh)
    assert again.load(learner).extra == b"since"
    store.save(18, learner)
    assert (again.latest(), again.steps()) == (18, [15, 18])
    again.close()


def test_the_same_step_can_be_saved_again(store, mesh):
    learner = make_learner()
    store.save(1, learner, b"first")
    store.save(1, learner, b"second")
    assert store.load(make_learner(), 1).extra == b"second"
    # killed between the two renames: the earlier save is put back
    path = Path(store.path(1))
    path.rename(path.with_name(".replaced-00000001"))
    again = CheckpointStore(path.parent, mesh)
    assert again.load(make_learner(), 1).extra == b"second"
    again.close()


@pytest.mark.parametrize(("step", "extra"), [(-1, b""), (1, "text"), (1, {"a": 1})])
def test_what_cannot_be_read_again_is_not_saved(store, step, extra):
    with pytest.raises(CheckpointError, match=r"steps count from 0, and extra is bytes"):
        store.save(step, make_learner(), extra)
    assert store.steps() == []


@pytest.mark.parametrize("score", [np.float32(0.5), torch.tensor(0.5)])
def test_scores_of_numpy_and_torch_are_scores(store, score):
    store.save(1, make_learner(), score=score)
    assert store.best() == 1
    assert store.load(make_learner()).score == 0.5


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_steps_of_numpy_and_torch_are_steps(store, step):
    learner = make_learner()
    store.save(step, learner)
    assert store.load(learner).step == 3


def test_an_empty_store_says_so(store):
    assert store.latest() is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        store.load(make_learner())
    with pytest.raises(CheckpointError, match="step-00000009 does not exist"):
        store.load(make_learner(), 9)


def damage_length(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def damage_content(path: Path) -> None:
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (damage_length, r"__0_0.distcp has \d+ bytes, not \d+"),
        (damage_content, "__0_0.distcp has other content"),
        (lambda path: (path / ".metadata").write_bytes(b""), ".metadata has 0 bytes"),
        (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
        (lambda path: (path / "manifest.json").write_text('{"format": 1'), "damaged: manifest"),
        (lambda path: (path / "manifest.json").write_text('{"format": 9}'), "has format 9; this"),
    ],
)
def test_a_damaged_checkpoint_is_refused(store, damage, message):
    damage(Path(store.save(1, make_learner())))
    with pytest.raises(CheckpointError, match=message):
        store.load(make_learner())


def test_a_checkpoint_of_another_model_names_the_tensor(store):
    store.save(1, make_learner(width=4))
    with pytest.raises(CheckpointError, match=r"0.weight needs \(6, 3\), .* has \(4, 3\)"):
        store.load(make_learner(width=6))
    learner = make_learner()
    learner.model.register_parameter("extra", nn.Parameter(torch.zeros(2)))
    with pytest.raises(CheckpointError, match=r"extra needs .* has no such tensor"):
        store.load(learner)


def test_a_save_that_cannot_be_written_is_an_error_and_the_one_before_stays(tmp_path, mesh):
    store = CheckpointStore(tmp_path, mesh)
    learner = make_learner()
    store.save(1, learner)
    (tmp_path / ".writing-00000002").write_text("a file where the directory should be")
    store.start_save(2, learner)
    with pytest.raises(CheckpointError, match=r"not written|checkpoints in"):
        store.wait()
    assert store.steps() == [1]
    store.close()


def test_leftovers_that_cannot_be_removed_do_not_keep_a_run_from_saving(tmp_path, mesh):
    store = CheckpointStore(tmp_path, mesh, retention=RetentionConfig(keep=1))
    # as a directory is over NFS that has a file which somebody reads
    kept = tmp_path / ".writing-removed-00000007"
    kept.write_text("not a directory, so that it cannot be removed as one")
    for step in (8, 9):
        store.save(step, make_learner())
    assert (store.steps(), kept.exists()) == ([9], True)


def test_what_a_full_disk_took_of_a_save_is_given_back_and_the_next_save_is_whole(tmp_path, mesh):
    store = CheckpointStore(tmp_path, mesh)
    learner = make_learner()
    store.save(1, learner)
    with no_file_longer_than(600), pytest.raises(CheckpointWriteError, match="not written"):
        store.save(2, learner)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert store.save(3, learner).endswith("step-00000003")
    assert store.load(make_learner()).step == 3
    store.close()


def test_settings_are_checked(tmp_path, mesh):
    with pytest.raises(ValueError, match="keep is 0"):
        RetentionConfig(keep=0)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make checkpoint directory"):
        CheckpointStore(tmp_path / "file" / "below", mesh)


SAVES_FOR_EVER = """
import sys
from pathlib import Path
import torch
from torch import nn
from cosmos_parallel import *
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20)))
learner = Learner(model, LearnerConfig())
store = CheckpointStore(Path(sys.argv[1]), build_mesh(ParallelConfig()))
def loss(model, batch):
    return SftLoss(total=model(batch).sum(), weight=torch.tensor(1.0), metrics={})
step = 0
while True:
    step += 1
    learner.step([torch.ones(1, 300)], loss)
    store.save(step, learner, str(step).encode())
"""


def kill_in_mid_save(directory: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES_FOR_EVER, str(directory)],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    try:
        while not (any(directory.glob("step-*")) and any(directory.glob(".writing-*/__0_0*"))):
            assert process.poll() is None
            assert time.monotonic() < deadline
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_kill_during_a_save_leaves_the_one_before_usable(tmp_path, mesh):
    for attempt in range(5):
        directory = tmp_path / str(attempt)
        kill_in_mid_save(directory)
        if any(directory.glob(".writing-*")):
            break
    else:
        pytest.fail("no kill fell into a save")
    store = CheckpointStore(directory, mesh)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20)))
    learner = Learner(model, LearnerConfig())
    checkpoint = store.load(learner)
    assert checkpoint.extra == str(checkpoint.step).encode()
    store.save(checkpoint.step + 1, learner)
    assert not list(directory.glob(".writing-*"))
    store.close()


# what is saved with which score, what is kept, and what must be left after the last save
RETENTIONS = [
    (RetentionConfig(keep=1, keep_best=1), [3.0, 1.0, 2.0], [2, 3], 2),
    # the newest is the best: nothing else stays
    (RetentionConfig(keep=1, keep_best=1), [3.0, 2.0, 1.0], [3], 3),
    (RetentionConfig(keep=1, keep_best=1, better="higher"), [3.0, 1.0, 2.0], [1, 3], 1),
    (RetentionConfig(keep=1, keep_best=2), [3.0, 1.0, 2.0, 4.0], [2, 3, 4], 2),
    # of equals the newest
    (RetentionConfig(keep=1, keep_best=1), [1.0, 1.0, 2.0], [2, 3], 2),
    # a score that is not a number is none
    (RetentionConfig(keep=1, keep_best=1), [math.nan, 2.0, 3.0], [2, 3], 2),
    (RetentionConfig(keep=1, keep_best=1, better="higher"), [2.0, math.nan, 1.0], [1, 3], 1),
    (RetentionConfig(keep=1, keep_best=1), [1.0, math.nan], [1, 2], 1),
    # saved without a score
    (RetentionConfig(keep=1, keep_best=1), [None, None], [2], None),
]


@pytest.mark.parametrize(("retention", "scores", "left", "best"), RETENTIONS)
def test_the_best_stay_beside_the_newest(tmp_path, mesh, retention, scores, left, best):
    store = CheckpointStore(tmp_path, mesh, retention=retention)
    for step, score in enumerate(scores, start=1):
        store.save(step, make_learner(), score=score)
    assert store.steps() == left
    assert store.best() == best
    if best is not None:
        assert store.load(make_learner(), best).score == scores[best - 1]
    store.close()
