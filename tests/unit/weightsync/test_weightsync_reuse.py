"""Versions that are fetched as what changed since the one before, over real sockets."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from cosmos_weightsync import (
    BaseVersionError,
    Box,
    ConfigurationError,
    ReceiverConfig,
    SenderConfig,
    Shard,
    ShardSpec,
    WeightReceiver,
    WeightSender,
)
from cosmos_weightsync.shards import torch_dtype

SHAPES = {
    "wide": ((64, 1000), "bfloat16"),
    "fp8": ((200, 300), "float8_e4m3fn"),
    "master": ((37, 41), "float32"),
    "step": ((), "int64"),
    "mask": ((129,), "bool"),
    "frozen": ((500, 400), "bfloat16"),
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Trainer:
    """Two ranks, Shard(0) but for the scalar; random bits, NaNs of all kinds included."""

    def __init__(self, stack: ExitStack, **config) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.full = {
            name: torch.zeros(shape, dtype=torch_dtype(dtype))
            for name, (shape, dtype) in SHAPES.items()
        }
        self.change(1.0, SHAPES)
        self.senders = [
            stack.enter_context(
                WeightSender(
                    self.shards(rank), rank=rank, num_ranks=2, config=SenderConfig(**config)
                )
            )
            for rank in range(2)
        ]

    def bits(self, name: str) -> torch.Tensor:
        tensor = self.full[name]
        return tensor.view(-1).view(INTEGERS[tensor.element_size()])

    def change(self, share: float, names=("wide", "fp8", "master", "step", "mask")) -> None:
        for name in names:
            bits = self.bits(name)
            new = torch.empty_like(bits).random_(generator=self.generator)
            if name == "mask":
                new &= 1
            where = torch.rand(bits.shape, generator=self.generator) < share
            bits[where] = new[where]

    def shards(self, rank: int) -> list[Shard]:
        found = []
        for name, tensor in self.full.items():
            half = -(-tensor.shape[0] // 2) if tensor.ndim else 0
            start, stop = [(0, half), (half, tensor.shape[0] if tensor.ndim else 0)][rank]
            rest = tuple(tensor.shape[1:])
            box = Box((start, *(0 for _ in rest)), (stop, *rest)) if tensor.ndim else Box((), ())
            spec = ShardSpec(name, tuple(tensor.shape), box, SHAPES[name][1])
            found.append(Shard(spec, tensor[box.relative_to(Box.full(tensor.shape))]))
        return found

    @property
    def endpoints(self) -> list[str]:
        return [sender.endpoint for sender in self.senders]

    def publish(self, version: int) -> dict[str, bytes]:
        for sender in self.senders:
            sender.publish(version)
        return {name: self.bits(name).numpy().tobytes() for name in self.full}

    def receiver(self, **config) -> WeightReceiver:
        config = {"transport": "tcp", "reuse": "changes", "bucket_bytes": 64 << 10, **config}
        return WeightReceiver(self.endpoints, config=ReceiverConfig(**config))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def trainer(stack) -> Trainer:
    return Trainer(stack)


def staged(receiver: WeightReceiver) -> dict[str, bytes]:
    shards = {s.spec.name: s.tensor for s in receiver.staged_shards()}
    return {
        name: t.view(-1).view(INTEGERS[t.element_size()]).numpy().tobytes()
        for name, t in shards.items()
    }


def test_versions_arrive_bit_for_bit_at_any_share_of_changes(stack, trainer):
    old = stack.enter_context(trainer.receiver())
    for version, share in enumerate([0.0, 1.0, 0.01, 0.0, 0.3, 0.001, 1.0, 0.02, 0.05], start=1):
        trainer.change(share)
        expected = trainer.publish(version)
        taken = old.stage(version)
        assert staged(old) == expected
        assert old.verify() == taken.digest
        if version % 3 == 0:  # A newcomer fetches everything, and then changes too.
            stack.enter_context(trainer.receiver()).stage(version)
            joined = stack.enter_context(trainer.receiver())
            assert joined.stage(version).digest == taken.digest
            assert staged(joined) == expected


def test_little_crosses_when_little_changed(trainer):
    with trainer.receiver() as receiver:
        trainer.publish(1)
        first = receiver.stage(1)
        assert first.wire_bytes == first.num_bytes
        trainer.change(0.01)
        trainer.publish(2)
        second = receiver.stage(2)
        assert second.num_bytes == first.num_bytes
        assert 0.002 < second.wire_bytes / first.num_bytes < 0.02
        trainer.publish(3)
        assert receiver.stage(3).wire_bytes == 0


def test_frozen_parameters_are_sent_once_and_to_newcomers(trainer):
    frozen = 500 * 400 * 2
    with trainer.receiver(reuse="pieces") as receiver:
        trainer.publish(1)
        first = receiver.stage(1)
        trainer.change(1.0)
        expected = trainer.publish(2)
        assert receiver.stage(2).wire_bytes == first.num_bytes - frozen
        assert staged(receiver) == expected
        with trainer.receiver(reuse="pieces") as late:
            assert late.stage(2).wire_bytes == first.num_bytes
            assert staged(late) == expected


@pytest.mark.parametrize("transport", ["shared_memory", "cross_memory"])
def test_one_sided_transports_leave_out_what_did_not_change(trainer, transport):
    with trainer.receiver(transport=transport) as receiver:
        trainer.publish(1)
        first = receiver.stage(1)
        trainer.change(1.0, ["wide"])
        expected = trainer.publish(2)
        assert receiver.stage(2).wire_bytes == 64 * 1000 * 2 < first.num_bytes
        assert staged(receiver) == expected


def test_a_whole_version_comes_as_often_as_asked(trainer):
    with trainer.receiver(anchor_every=2) as receiver:
        wire = []
        for version in range(1, 8):
            trainer.publish(version)
            wire.append(receiver.stage(version).wire_bytes > 0)
    assert wire == [True, False, False, True, False, False, True]


def test_a_receiver_that_lags_needs_a_base_that_is_kept(stack):
    for num_bases, is_sparse in ((0, False), (1, True)):
        trainer = Trainer(stack, num_bases=num_bases)
        with trainer.receiver() as receiver:
            trainer.publish(1)
            receiver.stage(1)
            for version in (2, 3, 4, 5):
                trainer.change(0.01)
                expected = trainer.publish(version)
            taken = receiver.stage(5)
            assert staged(receiver) == expected
            assert (taken.wire_bytes < taken.num_bytes / 4) == is_sparse
            # A third where a sender had not yet heard that the first was given back.
            assert {s.num_snapshots - num_bases for s in trainer.senders} <= {2, 3}


def test_memory_that_is_not_the_version_it_was_is_found_and_fetched_whole(trainer):
    with trainer.receiver() as receiver:
        trainer.publish(1)
        receiver.stage(1)
        damaged = {shard.spec.name: shard for shard in receiver.staged_shards()}["wide"]
        damaged.tensor.view(torch.int16)[40, 7] ^= 1
        trainer.change(0.01)
        expected = trainer.publish(2)
        again = receiver.stage(2)
        assert again.wire_bytes == again.num_bytes
        assert staged(receiver) == expected


def test_a_wrong_base_is_an_error_that_names_the_tensor(trainer):
    with trainer.receiver() as receiver:
        trainer.publish(1)
        receiver.stage(1)
        trainer.change(0.01)
        trainer.publish(2)
        session = receiver._fetcher._edges[0].session
        assert session is not None
        shadow = receiver._shadow
        from cosmos_weightsync.deadlines import Deadline
        from cosmos_weightsync.reuse import Offer

        soon = Deadline.after(30)
        shadow.shards[0].tensor.view(torch.int16)[3, 3] ^= 1
        session.pin(2, "newest", soon)
        with pytest.raises(BaseVersionError, match=r"wide .*the receiver's version 1 is not that"):
            session.pull(shadow.here(), receiver._buckets, soon, offer=Offer(1, "", "changes"))


def test_a_restarted_trainer_is_no_base(stack, trainer):
    for run in ("first", "second"):
        with ExitStack() as life:
            again = Trainer(life, run_id=run)
            with again.receiver() as receiver:
                again.change(0.5)
                expected = again.publish(1)
                receiver.stage(1)
                assert staged(receiver) == expected


@pytest.mark.parametrize("config", [{"reuse": "all"}, {"anchor_every": 0}])
def test_nonsense_is_refused(config):
    with pytest.raises(ConfigurationError, match="reuse must be"):
        ReceiverConfig(**config)
