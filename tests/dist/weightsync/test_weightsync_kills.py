"""SIGKILL at any moment: every survivor has one version whole, and its `version` says which.

Version v is the number v in every element, so a mixture cannot hide. Two senders hold the same
model; one receiver fetches from them, one from the other receiver where it can. Each round a new
version is published, both receivers update, and one of the four processes is killed, by the clock
or, over TCP, at a message of its own. ``--weightsync-kills 300`` makes it a long hunt.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cosmos_weightsync import WeightDirectory

ROLES = ("sender 0", "sender 1", "receiver 0", "receiver 1")


class Cluster:
    """Two senders, two receivers, one directory."""

    def __init__(self, zygote: Any, mode: str, transport: str) -> None:
        self.directory = WeightDirectory(lease_s=5.0)
        self._zygote = zygote
        self.mode, self.transport = mode, transport
        self.processes = {role: self.start(role) for role in ROLES}

    def start(self, name: str) -> Any:
        role, rank = name.split()
        more = {"num_ranks": 2}
        if role == "receiver":
            prefer = "receivers" if int(rank) else "senders"
            how = {"mode": self.mode, "transport": self.transport}
            more = {"config": {**how, "prefer": prefer}}
        return self._zygote.fork(
            directory=self.directory.endpoint, role=role, rank=int(rank), **more
        )

    def close(self) -> None:
        for process in self.processes.values():
            process.close()
        self.directory.close()


@pytest.fixture(
    params=[
        ("staged", "tcp"),
        ("in_place", "tcp"),
        ("staged", "shared_memory"),
        ("staged", "cross_memory"),
        ("in_place", "process_group"),
    ],
    ids=" ".join,
)
def cluster(request: pytest.FixtureRequest, zygote: Any) -> Iterator[Cluster]:
    found = Cluster(zygote, *request.param)
    yield found
    found.close()


def round_of(cluster: Cluster, version: int, chance: random.Random) -> str:
    """Publish, update, kill; check the survivors; start the victim again. Returns who died."""
    name = chance.choice(ROLES)
    victim = cluster.processes[name]
    if by_message := chance.random() < 0.5 and cluster.transport == "tcp":
        victim.tell("die_at", message=chance.randrange(40))
        victim.answer()
    for role in ROLES:
        process = cluster.processes[role]
        if role.startswith("sender"):
            process.tell("publish", version=version)
        else:
            process.tell("update", version=version, timeout_s=60)
    if not by_message:
        time.sleep(chance.random() * 0.15)
        victim.kill()
    answers = {role: cluster.processes[role].answer() for role in ROLES}
    victim.kill()  # It had fewer messages to move than it was to die at.
    for role in ("receiver 0", "receiver 1"):
        answer = answers[role]
        if role == name and answer is None:
            continue
        assert answer is not None, f"{role} died with {name}"
        assert answer["error"] == "", (version, name, by_message, role, answer)
        assert answer["version"] == version
        assert answer["values"] == [float(version)]
        if cluster.mode == "staged":  # what is in use meanwhile is one version, whole
            served = answer["meanwhile"]
            assert served["values"] == [float(served["version"] or 0)]
            assert served["version"] in (None, version - 1)
    victim.close()
    cluster.processes[name] = again = cluster.start(name)
    if name.startswith("sender"):
        again.tell("publish", version=version)
        assert again.answer() == {"version": version}
    else:
        again.tell("update", version=version, timeout_s=60)
        answer = again.answer()
        assert answer is not None
        assert (answer["error"], answer["version"]) == ("", version)
        assert answer["values"] == [float(version)]
    return name


@pytest.mark.slow
def test_whoever_is_killed_the_others_have_one_version_whole(cluster, request):
    num_kills = request.config.getoption("--weightsync-kills", default=None) or 16
    chance = random.Random(num_kills)
    killed = [round_of(cluster, version, chance) for version in range(1, num_kills + 1)]
    assert set(killed) == set(ROLES)


@pytest.mark.slow
def test_with_every_sender_dead_receivers_keep_what_they_have_and_say_so(cluster):
    for role in ROLES:
        if role.startswith("sender"):
            cluster.processes[role].tell("publish", version=1)
    for role in ("receiver 0", "receiver 1"):
        cluster.processes[role].tell("update", version=1, timeout_s=60)
    assert [cluster.processes[role].answer() for role in ROLES[:2]] == [{"version": 1}] * 2
    for role in ROLES[2:]:
        answer = cluster.processes[role].answer()
        assert (answer["error"], answer["version"], answer["values"]) == ("", 1, [1.0])
    for role in ROLES[:2]:
        cluster.processes[role].kill()
    receiver = cluster.processes["receiver 0"]
    receiver.tell("update", version=2, timeout_s=3)
    answer = receiver.answer()
    assert "Error" in answer["error"]
    assert (answer["version"], answer["values"]) in [(1, [1.0]), (None, [1.0])]
