"""Checkpoints in an object store: fsspec's memory file system, which has no rename of folders."""

import uuid

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from cosmos_parallel import (
    CheckpointError,
    CheckpointStore,
    Learner,
    LearnerConfig,
    ParallelConfig,
    RetentionConfig,
    SftLoss,
    build_mesh,
)


def make_learner(seed: int = 0) -> Learner:
    torch.manual_seed(seed)
    return Learner(nn.Linear(3, 2), LearnerConfig())


def loss(model: nn.Module, batch: torch.Tensor) -> SftLoss:
    return SftLoss(total=model(batch).square().sum(), weight=torch.tensor(1.0), metrics={})


def train(learner: Learner, first: int, last: int) -> list[float]:
    return [
        learner.step([torch.full((1, 3), float(step))], loss).loss for step in range(first, last)
    ]


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def store(url):
    store = CheckpointStore(url, build_mesh(ParallelConfig()))
    yield store
    store.close()


@pytest.fixture
def files():
    return fsspec.filesystem("memory")


def test_a_learner_resumes_from_an_object_store(store, url):
    learner = make_learner()
    train(learner, 0, 3)
    assert store.save(3, learner, b"cut", score=0.5) == f"{url}/step-00000003.0"
    expected = train(learner, 3, 6)
    resumed = make_learner(seed=1)
    checkpoint = store.load(resumed)
    assert (checkpoint.step, checkpoint.extra, checkpoint.score) == (3, b"cut", 0.5)
    assert train(resumed, 3, 6) == expected


def test_what_has_no_manifest_is_no_checkpoint_and_goes_with_the_next_save(store, url, files):
    store.save(1, make_learner())
    # a save that was killed before its last object
    inside = url.removeprefix("memory:/")
    files.pipe_file(f"{inside}/step-00000002.0/__0_0.distcp", b"half")
    assert store.steps() == [1]
    assert store.load(make_learner()).step == 1
    store.save(3, make_learner())
    assert store.steps() == [1, 3]
    assert not files.exists(f"{inside}/step-00000002.0")


def test_the_same_step_can_be_saved_again(store, url, files):
    store.save(1, make_learner(), b"first")
    assert store.save(1, make_learner(), b"second").endswith("step-00000001.1")
    assert store.load(make_learner(), 1).extra == b"second"
    assert not files.exists(f"{url.removeprefix('memory:/')}/step-00000001.0")


def test_old_ones_go(url):
    store = CheckpointStore(
        url, build_mesh(ParallelConfig()), retention=RetentionConfig(keep=1, keep_best=1)
    )
    for step, score in ((1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0)):
        store.save(step, make_learner(), score=score)
    assert store.steps() == [2, 4]
    assert store.best() == 2
    store.close()


class AddOnly(MemoryFileSystem):
    """A store in which nothing is deleted, as under a bucket's policy."""

    protocol = "addonly"

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        raise PermissionError(f"AccessDenied: {path}")

    rm_file = rm


def test_a_store_that_deletes_nothing_keeps_all_that_is_saved_and_it_is_said_once(caplog):
    fsspec.register_implementation("addonly", AddOnly, clobber=True)
    url = f"addonly://{uuid.uuid4().hex}/run"
    files = AddOnly()
    files.pipe_file(f"{url.removeprefix('addonly:/')}/step-00000001.0/__0_0.distcp", b"half")
    store = CheckpointStore(url, build_mesh(ParallelConfig()), retention=RetentionConfig(keep=1))
    learner = make_learner()
    for step in (1, 2, 2):
        train(learner, step, step + 1)
        path = store.save(step, learner, str(step).encode())
    assert path == f"{url}/step-00000002.1"
    assert store.steps() == [1, 2]
    assert store.load(make_learner(seed=1)).step == 2
    assert store.load(make_learner(seed=1), 1).extra == b"1"
    store.close()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{url}/step-" in said
    assert "AccessDenied" in said
    assert "rule of the store" in said


def test_a_short_object_is_refused(store, files):
    inside = store.save(1, make_learner()).removeprefix("memory:/")
    data = files.cat_file(f"{inside}/__0_0.distcp")
    files.pipe_file(f"{inside}/__0_0.distcp", data[:-1])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has \d+ bytes, not \d+"):
        store.load(make_learner())


def test_a_missing_checkpoint_and_an_unknown_protocol_are_errors(store):
    with pytest.raises(CheckpointError, match="there is no checkpoint in memory://"):
        store.load(make_learner())
    with pytest.raises(CheckpointError, match="does not exist"):
        store.load(make_learner(), 9)
    with pytest.raises(CheckpointError, match="Protocol not known: nowhere"):
        CheckpointStore("nowhere://bucket", build_mesh(ParallelConfig()))


def test_a_learner_resumes_from_s3(store):
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        fsspec.config.conf["s3"] = {
            "endpoint_url": f"http://{host}:{port}", "key": "test", "secret": "test",
        }  # fmt: skip
        fsspec.filesystem("s3").mkdir("bucket")
        store = CheckpointStore("s3://bucket/run", build_mesh(ParallelConfig()))
        learner = make_learner()
        for step in (1, 2, 3):
            train(learner, step, step + 1)
            store.save(step, learner)
        assert store.steps() == [2, 3]
        resumed = make_learner(seed=1)
        assert store.load(resumed).step == 3
        assert train(resumed, 3, 5) == train(learner, 3, 5)
        store.close()
    finally:
        fsspec.config.conf.pop("s3", None)
        server.stop()
