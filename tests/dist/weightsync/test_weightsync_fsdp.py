"""FSDP2 trainers to receivers in other processes; some of both are killed."""

import random
import time
from contextlib import ExitStack

import pytest
import torch

from cosmos_weightsync import PeerLostError, ReceiverConfig, WeightReceiver

pytestmark = pytest.mark.slow

TRANSPORTS = ["shared_memory", "process_group", "tcp"]
ODD = {"width": 203, "depth": 6}  # 4 MB; no dimension is divided evenly.


def receiver_of(trainer, transport: str, **config) -> WeightReceiver:
    config = ReceiverConfig(transport=transport, **config)
    return WeightReceiver(trainer.endpoints, config=config)


def staged(receiver: WeightReceiver) -> dict[str, torch.Tensor]:
    return {shard.spec.name: shard.tensor for shard in receiver.staged_shards()}


def values(receiver: WeightReceiver) -> set[float]:
    """Every value in the staged version: one, if the trainer filled it with one."""
    return {float(v) for t in staged(receiver).values() for v in (t.min(), t.max())}


def assert_same(found: dict[str, torch.Tensor], path) -> None:
    wanted = torch.load(path)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def trainer(start_trainer):
    return start_trainer(2, "blocks", ODD)


@pytest.fixture(scope="module")
def versions():
    """The shared trainer's versions, each used once."""
    return iter(range(1, 1000))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_arrive_exactly_while_parameters_change(trainer, versions, tmp_path, transport):
    with receiver_of(trainer, transport, bucket_bytes=4096) as receiver:
        for version in (next(versions) for _ in range(3)):
            trainer.ask("step", scale=0.1)
            trainer.ask("save", path=str(tmp_path / "wanted.pt"))
            trainer.ask("publish", version=version)
            trainer.tell("step", scale=0.1)  # Goes on at once.
            assert receiver.stage(version, timeout_s=60).version == version
            trainer.answers()
            assert_same(staged(receiver), tmp_path / "wanted.pt")


def is_held(state):
    """Whether a rank still keeps anything for receivers other than the survivor.

    The survivor's own pin goes when its release arrives, a moment after its `stage` returned.
    """
    return state["num_sessions"] > 1 or sum(state["pins"]) > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_killed_at_any_moment_harms_nobody(trainer, versions, start_receiver, transport):
    version = next(versions)
    trainer.ask("fill", value=float(version))
    trainer.ask("publish", version=version)
    victims = [start_receiver(trainer.endpoints, transport=transport) for _ in range(2)]
    chance = random.Random(7)
    for victim in victims:
        victim.tell("forever")
    for victim in victims:
        time.sleep(0.3 + chance.random() * 0.2)
        victim.kill()
    with receiver_of(trainer, transport) as survivor:
        version = next(versions)
        trainer.ask("fill", value=float(version))
        trainer.ask("publish", version=version)
        assert survivor.stage(version, timeout_s=60).version == version
        assert values(survivor) == {float(version)}
        deadline = time.monotonic() + 30
        while any(is_held(state) for state in trainer.ask("state")):
            assert time.monotonic() < deadline, "a dead receiver's session or pin lives on"
            time.sleep(0.1)


def test_a_killed_sender_rank_is_an_error_and_never_a_mixture(start_trainer):
    trainer = start_trainer(2, "blocks", ODD)
    trainer.tell("train", first=1, last=100_000, pause_s=0.002)
    with ExitStack() as stack:
        receivers = [stack.enter_context(receiver_of(trainer, name)) for name in TRANSPORTS]
        for receiver in receivers * 3:
            version = receiver.stage(timeout_s=60).version
            assert values(receiver) == {float(version)}
        trainer.ranks[1].kill()
        for receiver in receivers:
            committed = receiver.commit()
            with pytest.raises(PeerLostError):
                stage_forever(receiver)
            assert receiver.version == committed
    trainer.ranks[0].kill()

    again = start_trainer(2, "blocks", ODD)
    runs = [{state["run_id"] for state in started.states} for started in (trainer, again)]
    assert [len(names) for names in runs] == [1, 1]  # Ranks agree, runs differ.
    assert runs[0].isdisjoint(runs[1])
    again.ask("fill", value=3.0)
    again.ask("publish", version=1)
    with receiver_of(again, "auto") as receiver:
        receiver.stage(1, timeout_s=60)
        assert values(receiver) == {3.0}


def stage_forever(receiver: WeightReceiver) -> None:
    """What can still be staged is whole; in the end the dead rank is missed."""
    while True:
        version = receiver.stage(timeout_s=30).version
        assert values(receiver) == {float(version)}


def test_fsdp_over_tensor_parallel_shards(start_trainer, tmp_path):
    trainer = start_trainer(4, "blocks", {"width": 24, "depth": 2}, mesh=[2, 2])
    assert any("_StridedShard" in text for text in trainer.states[0]["placements"])
    trainer.ask("step", scale=0.1)
    trainer.ask("save", path=str(tmp_path / "wanted.pt"))
    trainer.ask("publish", version=1)
    with receiver_of(trainer, "auto") as receiver:
        receiver.stage(1, timeout_s=60)
        assert_same(staged(receiver), tmp_path / "wanted.pt")


def test_a_receiver_needs_the_shadow_and_its_buckets_and_no_more(start_trainer, start_receiver):
    trainer = start_trainer(1, "blocks", {"width": 1000, "depth": 8})
    trainer.ask("publish", version=1)
    receiver = start_receiver(trainer.endpoints, transport="tcp", bucket_bytes=1 << 20)
    first = receiver.ask("stage", version=1, timeout_s=60)
    model_kib = first["num_bytes"] / 1024
    assert model_kib > 100_000
    # A bucket of 1 MiB, a thread and its code on top of one copy of the model.
    assert first["grown_kib"] < model_kib + 16 * 1024
    trainer.ask("publish", version=2)
    assert receiver.ask("stage", version=2, timeout_s=60)["grown_kib"] < 8 * 1024
