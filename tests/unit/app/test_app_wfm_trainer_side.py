"""The side of a disaggregated run that trains, talked to over its real connections."""

import socket
import sys
import threading
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("cosmos_weightsync")

from cosmos_app.supervisor import ChildSpec
from cosmos_app.wfm.disaggregated.keeping import KeptReplicas
from cosmos_app.wfm.disaggregated.meeting import read_places
from cosmos_app.wfm.disaggregated.pulse import Pulse
from cosmos_app.wfm.disaggregated.trainer import ReplicaLostError, ReplicaRollouts
from cosmos_parallel import ParallelConfig, build_mesh
from cosmos_wfm import (
    DiffusionRlConfig,
    DisaggregatedConfig,
    Rollout,
    RolloutMessage,
    Scores,
    StepParts,
    pack_rollout,
    parse_order,
)

DEADLINE_S = 120.0
LEASE_S = 3.0
STOPS_ONCE = """
import os, signal, sys
from multiprocessing.connection import Client
from pathlib import Path
from cosmos_app.wfm.disaggregated.pulse import Pulse

home, host, port, lease_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
link = Client((host, port), authkey=b"secret")
with Pulse([link], lease_s, child="replica0") as pulse:
    for place in (0, 1):
        pulse.send(link, b"")
        link.recv_bytes()
        if not (home / "stopped").exists():
            (home / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        pulse.send(link, (home / f"samples{place}").read_bytes())
    link.recv_bytes()
"""


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """A rank that has published version 0; replicas may be a step ahead."""
    monkeypatch.setenv("COSMOS_HOST", "127.0.0.2")  # an address that was told, not the default
    recipe = DiffusionRlConfig(
        model="",
        prompts="",
        output=str(tmp_path),
        rewards={"brightness": 1.0},
        num_steps=3,
        disaggregated=DisaggregatedConfig(
            start=False, max_lag=1, lease_s=LEASE_S, deadline_s=DEADLINE_S
        ),
    )
    parts = StepParts(num_samples=4, samples_per_group=2, micro_batch_size=2, num_ranks=1)
    mesh = build_mesh(ParallelConfig())
    weights = {"w": torch.zeros(2)}
    rollouts = ReplicaRollouts(weights, parts, recipe=recipe, mesh=mesh, token="secret")
    rollouts.publish(0)
    yield rollouts
    rollouts.close()


@pytest.fixture
def replica(rank, tmp_path):
    """Connects as a replica does."""
    (place,) = read_places(tmp_path, DEADLINE_S)
    assert place.host == "127.0.0.2"
    links = []

    def connect(token=place.token):
        links.append(Client((place.host, place.port), authkey=token.encode()))
        return links[-1]

    silent = socket.create_connection((place.host, place.port), timeout=DEADLINE_S)
    yield connect  # whoever connects and says nothing keeps nobody from it
    silent.close()
    for link in links:
        link.close()


def ordered(link):
    """Say that one is free; return step, place, numbers and version of what is ordered then."""
    link.send_bytes(b"")
    assert link.poll(DEADLINE_S)
    order = parse_order(link.recv_bytes())
    return order.step, order.place, order.numbers, order.version


def packed(step, place):
    rewards = Future()
    rewards.set_result(Scores(values=(0.0, 1.0)))
    rollout = Rollout(
        numbers=[0, 1],
        prompts=["a", "b"],
        latents=torch.full((2, 1, 1, 1), 10.0 * step + place),
        steps=(),
        text={"e": torch.zeros(2, 1)},
        negative=None,
        rewards=rewards,
    )
    return pack_rollout(RolloutMessage(step=step, place=place, rollout=rollout))


def bring(link, step, place):
    link.send_bytes(packed(step, place))


def test_orders_go_on_before_samples_come_and_those_of_a_lost_one_go_to_others(rank, replica):
    lost, other = replica(), replica()
    assert ordered(lost) == (0, 0, (0, 1), 0)
    assert ordered(lost) == (0, 1, (2, 3), 0)  # while the rewards of the first are computed
    assert ordered(other) == (1, 0, (0, 1), 0)  # a step ahead, with weights a version older
    bring(lost, 0, 0)
    with pytest.raises(AuthenticationError):
        replica(token="wrong")

    bring(other, 1, 0)
    assert ordered(other) == (1, 1, (2, 3), 0)
    lost.close()
    assert ordered(other) == (0, 1, (2, 3), 0)
    bring(other, 0, 1)
    assert [float(r.latents[0, 0, 0, 0]) for r in rank.take(0)] == [0.0, 1.0]
    bring(other, 1, 1)
    rank.publish(1)
    assert ordered(other) == (2, 0, (0, 1), 1)
    assert [float(r.latents[0, 0, 0, 0]) for r in rank.take(1)] == [10.0, 11.0]

    rank.close()
    with pytest.raises((EOFError, ConnectionError)):
        other.recv_bytes() if other.poll(DEADLINE_S) else None


def test_bytes_that_are_no_samples_end_the_run(rank, replica):
    link = replica()
    assert ordered(link) == (0, 0, (0, 1), 0)
    link.send_bytes(b"no samples")
    with pytest.raises(ReplicaLostError, match="step 0 is missing: no micro-batch of samples"):
        rank.take(0)


def test_the_work_of_one_that_hangs_goes_to_another_that_speaks(rank, replica):
    hung, other = replica(), replica()
    assert ordered(hung) == (0, 0, (0, 1), 0)
    with Pulse([other], LEASE_S) as pulse:  # which is all that it says for a while
        for place in ((0, 1, (2, 3), 0), (1, 0, (0, 1), 0), (1, 1, (2, 3), 0)):
            pulse.send(other, b"")
            assert other.poll(DEADLINE_S)
            found = parse_order(other.recv_bytes())
            assert (found.step, found.place, found.numbers, found.version) == place
        pulse.send(other, packed(0, 1))
        pulse.send(other, b"")

        def draw_again():
            assert other.poll(DEADLINE_S)
            found = parse_order(other.recv_bytes())
            assert (found.step, found.place) == (0, 0)
            pulse.send(other, packed(0, 0))

        drawing = threading.Thread(target=draw_again)
        drawing.start()
        taken = [float(r.latents[0, 0, 0, 0]) for r in rank.take(0)]
        drawing.join()
    assert taken == [0.0, 1.0]

    # awake again: what it brings late is not wanted, and it is asked for the next
    bring(hung, 0, 0)
    rank.publish(1)
    assert ordered(hung) == (2, 0, (0, 1), 1)


@pytest.mark.slow
def test_the_only_replica_is_started_again_where_it_is_stopped(rank, tmp_path, capfd):
    (place,) = read_places(tmp_path, DEADLINE_S)
    for number in (0, 1):
        (tmp_path / f"samples{number}").write_bytes(packed(0, number))
    spec = ChildSpec(
        name="replica0",
        argv=[sys.executable, "-c", STOPS_ONCE, tmp_path, place.host, str(place.port), "3"],
        environment={},
        log=tmp_path / "log",
        restarts=100,
    )
    with KeptReplicas([spec]) as kept:
        rank.on_hung = kept.kill
        taken = [float(r.latents[0, 0, 0, 0]) for r in rank.take(0)]
    assert taken == [0.0, 1.0]
    replica = f"replica0 (process {(tmp_path / 'stopped').read_text()})"
    said = capfd.readouterr().err
    assert f"{replica} said nothing for 3 s; it is killed, and its work (1 micro-batches) " in said
    assert f"{replica} ended: signal 9 (SIGKILL); restarted" in said
