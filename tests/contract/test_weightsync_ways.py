"""One contract for every way that versions take: over each transport, and by files.

Two ranks hold a model by rows; two receivers want it by columns. What a channel owes to those who
write to it is in `test_weightsync_transports`.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from capabilities import needs

from cosmos_weightsync import (
    Box,
    DeadlineError,
    DigestError,
    FileReceiver,
    FileSender,
    FileSenderConfig,
    LayoutError,
    PlanError,
    ReceiverConfig,
    SenderConfig,
    Shard,
    ShardSpec,
    UnknownTensorError,
    VersionError,
    WeightReceiver,
    WeightSender,
)
from cosmos_weightsync.transports import LocalTransport, NixlTransport, Transport

RANKS = 2
SHAPES = {"embed": (301, 64), "wide": (6, 40, 1024), "norm": (33,), "scale": ()}
WAYS = ["cross_memory", "local", "nixl", "process_group", "shared_memory", "tcp", "files"]
NOT_EVERYWHERE = {"nixl": needs("nixl", NixlTransport.is_installed())}

Receiver = WeightReceiver | FileReceiver
Senders = Sequence[WeightSender] | Sequence[FileSender]


def shard(name: str, tensor: torch.Tensor, dim: int, index: int) -> Shard:
    """A half along a dim, as `torch.chunk` cuts; of what has no such dim all of it."""
    box = Box.full(tensor.shape)
    if tensor.ndim > dim:
        step = -(-tensor.shape[dim] // RANKS)
        start, stop = list(box.start), list(box.stop)
        start[dim], stop[dim] = index * step, min((index + 1) * step, tensor.shape[dim])
        box = Box(tuple(start), tuple(stop))
    dtype = str(tensor.dtype).removeprefix("torch.")
    spec = ShardSpec(name, tuple(tensor.shape), box, dtype)
    return Shard(spec, tensor[box.relative_to(Box.full(tensor.shape))])


class Way:
    """A model, its senders, and how receivers come to it.

    Args:
        stack: Closes both sides.
        name: Of a transport, or ``files``.
        folder: For the files.
        wire_dtype: What the senders cast to.
    """

    def __init__(self, stack: ExitStack, name: str, folder: Path, wire_dtype: str = "") -> None:
        self.full: dict[str, torch.Tensor] = {n: torch.zeros(shape) for n, shape in SHAPES.items()}
        self.full["steps"] = torch.zeros(5, dtype=torch.int64)
        self._name, self._folder, self._stack = name, folder, stack
        self._transports: list[Transport] = [LocalTransport()] if name == "local" else []
        self._session = secrets.token_hex(4)
        self.senders: Senders = (
            [self._file_sender(rank, wire_dtype) for rank in range(RANKS)]
            if name == "files"
            else [self._sender(rank, wire_dtype) for rank in range(RANKS)]
        )

    def _shards(self, rank: int) -> list[Shard]:
        return [shard(name, tensor, 0, rank) for name, tensor in self.full.items()]

    def _sender(self, rank: int, wire_dtype: str) -> WeightSender:
        sender = WeightSender(
            self._shards(rank),
            rank=rank,
            num_ranks=RANKS,
            config=SenderConfig(wire_dtype=wire_dtype, run_id=self._session),
            transports=self._transports,
        )
        return self._stack.enter_context(sender)

    def _file_sender(self, rank: int, wire_dtype: str) -> FileSender:
        config = FileSenderConfig(wire_dtype=wire_dtype, session=self._session, timeout_s=60)
        return FileSender(
            self._shards(rank), self._folder, rank=rank, num_ranks=RANKS, config=config
        )

    def step(self, seed: int) -> dict[str, torch.Tensor]:
        """Train; returns a copy of what the model is now."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.full.values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.fill_(seed)
        return {name: tensor.clone() for name, tensor in self.full.items()}

    def publish(self, version: int) -> None:
        """On all ranks at the same time, as those who write files wait for one another."""
        with ThreadPoolExecutor(RANKS) as pool:
            for done in [pool.submit(sender.publish, version) for sender in self.senders]:
                done.result(timeout=60)

    def receiver(self, wanted: Sequence[Shard | ShardSpec] | None = None) -> Receiver:
        if self._name == "files":
            receiver: Receiver = FileReceiver(self._folder, wanted=wanted)
        else:
            receiver = WeightReceiver(
                [sender.endpoint for sender in self.senders if isinstance(sender, WeightSender)],
                wanted=wanted,
                config=ReceiverConfig(transport=self._name),
                transports=self._transports,
            )
        self._stack.callback(receiver.close)
        return receiver


@pytest.fixture(params=[pytest.param(n, marks=NOT_EVERYWHERE.get(n, ())) for n in WAYS])
def make_way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Way]]:
    with ExitStack() as stack:
        yield lambda **more: Way(stack, request.param, tmp_path, **more)


@pytest.fixture
def way(make_way: Callable[..., Way]) -> Way:
    return make_way()


def targets(index: int = 0) -> tuple[dict[str, torch.Tensor], list[Shard]]:
    """Memory for a model, and the half of its columns that this receiver wants."""
    memory = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    memory["steps"] = torch.full((5,), -1)
    return memory, [shard(name, tensor, 1, index) for name, tensor in memory.items()]


def in_use(shards: Sequence[Shard], model: dict[str, torch.Tensor]) -> bool:
    """Whether the memory of these shards is the model's, bit for bit."""
    specs = [s.spec for s in shards]
    whole = [spec.box.relative_to(Box.full(spec.global_shape)) for spec in specs]
    expected = [model[spec.name][part] for spec, part in zip(specs, whole, strict=True)]
    return all(torch.equal(s.tensor, e) for s, e in zip(shards, expected, strict=True))


def test_versions_arrive_exactly_and_beside_what_is_in_use(way):
    ends = []
    for index in range(2):
        memory, wanted = targets(index)
        ends.append((memory, wanted, way.receiver(wanted)))
    before = {name: torch.full_like(tensor, -1) for name, tensor in way.full.items()}
    for version in (1, 2, 5):
        model = way.step(version)
        way.publish(version)
        way.step(100 + version)  # Training goes on; what was published does not change.
        for _, wanted, receiver in ends:
            staged = receiver.stage(version)
            assert staged.version == version
            assert in_use(wanted, before)
            assert receiver.commit() == receiver.version == version
            assert in_use(wanted, model)
            assert receiver.verify() == staged.digest
        before = model
    for index, (memory, _, _) in enumerate(ends):  # Nothing of the other half was touched.
        (other,) = (s for s in targets(1 - index)[1] if s.spec.name == "embed")
        columns = other.spec.box.relative_to(Box.full(SHAPES["embed"]))
        assert torch.equal(memory["embed"][columns], torch.full_like(other.tensor, -1))


def test_who_names_nothing_gets_everything(way):
    model = way.step(3)
    way.publish(3)
    receiver = way.receiver()
    receiver.stage()
    found = {s.spec.name: s.tensor.clone() for s in receiver.staged_shards()}
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_columns_that_are_asked_for_again_lie_so_and_others_are_found_in_them(make_way, wire_dtype):
    way = make_way(wire_dtype=wire_dtype)
    asked = [[s.spec for s in targets(index)[1]] for index in range(2)]
    columns = Box((100, 10), (301, 50))  # Of all ranks and both halves.
    asked.append([ShardSpec("embed", SHAPES["embed"], columns, "float32")])
    halves = [
        way.receiver([replace(s, dtype=s.dtype.replace("float32", wire_dtype)) for s in specs])
        for specs in asked
    ]
    others = [halves.pop(), way.receiver()]
    for version in range(1, 6):
        model = way.step(version)
        if wire_dtype == "bfloat16":
            model = {n: t.bfloat16() if t.is_floating_point() else t for n, t in model.items()}
        way.publish(version)
        for receiver in (*halves, *(others if version >= 4 else ())):
            receiver.stage(version)
            for found in receiver.staged_shards():
                full = Box.full(found.spec.global_shape)
                expected = model[found.spec.name][found.spec.box.relative_to(full)]
                assert torch.equal(found.tensor, expected)
            receiver.commit()
            assert receiver.verify()


def test_what_is_sent_may_be_cast_and_is_for_all_receivers_alike(make_way):
    way = make_way(wire_dtype="bfloat16")
    model = way.step(4)
    way.publish(4)
    _, wanted = targets()
    receiver = way.receiver(wanted)
    receiver.stage()
    assert all(s.tensor.dtype in {torch.bfloat16, torch.int64} for s in receiver.staged_shards())
    receiver.commit()
    rounded = {n: t.bfloat16().float() if t.is_floating_point() else t for n, t in model.items()}
    assert in_use(wanted, rounded)


def test_the_newest_is_taken_and_one_that_does_not_come_is_not_waited_for_for_ever(way):
    model = way.step(1)
    way.publish(1)
    model = way.step(2)
    way.publish(2)
    _, wanted = targets()
    receiver = way.receiver(wanted)
    assert receiver.stage().version == 2
    receiver.commit()
    with pytest.raises(DeadlineError, match="version 3"):
        receiver.stage(3, timeout_s=0.5)
    assert receiver.version == 2
    assert in_use(wanted, model)
    model = way.step(3)
    way.publish(3)
    assert receiver.stage(3).version == 3
    receiver.commit()
    assert in_use(wanted, model)


@pytest.mark.parametrize("version", [7, 6, -1])
def test_a_version_is_newer_than_the_one_before(way, version):
    model = way.step(7)
    way.publish(7)
    way.step(8)
    with pytest.raises(VersionError, match=str(version)):
        way.senders[0].publish(version)
    _, wanted = targets()
    receiver = way.receiver(wanted)
    receiver.stage()
    receiver.commit()
    assert in_use(wanted, model)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "error"),
    [
        ("embeds", (301, 64), "float32", UnknownTensorError),
        ("embed", (302, 64), "float32", PlanError),
        ("steps", (5,), "bool", LayoutError),
    ],
)
def test_what_does_not_fit_is_named_and_the_version_in_use_stays(way, name, shape, dtype, error):
    spec = ShardSpec(name, shape, Box.full(shape), dtype)
    model = way.step(1)
    way.publish(1)
    _, wanted = targets()
    receiver = way.receiver(wanted)
    receiver.stage()
    receiver.commit()
    with pytest.raises(error, match=spec.name):
        way.receiver([*(s.spec for s in wanted if s.spec.name != spec.name), spec]).stage()
    assert receiver.version == 1
    assert receiver.verify()
    assert in_use(wanted, model)


def test_memory_that_is_not_what_came_is_found(way):
    way.step(1)
    way.publish(1)
    memory, wanted = targets()
    receiver = way.receiver(wanted)
    receiver.stage()
    receiver.commit()
    receiver.verify()
    memory["wide"][3, 5, 7] += 1.0
    with pytest.raises(DigestError, match="wide"):
        receiver.verify()


def test_nothing_is_put_to_use_that_did_not_come(way):
    _, wanted = targets()
    receiver = way.receiver(wanted)
    with pytest.raises(VersionError):
        receiver.commit()
    assert receiver.version is None
    way.step(1)
    way.publish(1)
    receiver.stage()
    receiver.close()
    receiver.close()  # May be repeated.
