"""Planned relays between processes: chains and trees, and a relay that is killed in the middle.

Every receiver says it is on a host of its own, over links so slow that passing on pays. Version v
is the number v in every element, so a mixture cannot hide.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cosmos_weightsync import Link, Links, WeightDirectory

SLOW = Link(bytes_per_s=1e8, latency_s=4e-3)
LINKS = Links(rail=SLOW, network=SLOW)
# 8 MiB are 8 chunks of 1 MiB: a chain of 4 takes 11 / 8 of one transfer.
CHAIN = {"shapes": {"w": [2 << 20]}, "bucket_bytes": 1 << 16, "num_receivers": 4}
# 800 KB are one chunk of 8 ms. For 9 receivers, three relays that feed two each are fastest.
TREE = {"shapes": {"w": [200, 1000]}, "bucket_bytes": 8192, "num_receivers": 9}


class Group:
    """Senders and receivers that plan together."""

    def __init__(
        self, zygote: Any, shapes: dict[str, list[int]], bucket_bytes: int, num_receivers: int
    ) -> None:
        self.directory = WeightDirectory(lease_s=5.0, links=LINKS)
        common = {"directory": self.directory.endpoint, "shapes": shapes}
        size = {"bucket_bytes": bucket_bytes}
        self.sender = zygote.fork(role="sender", rank=0, config=size, **common)
        self.receivers = [
            zygote.fork(
                role="receiver",
                rank=rank,
                config={**size, "prefer": "planned", "group": "g", "host": f"host {rank}"},
                **common,
            )
            for rank in range(num_receivers)
        ]

    def update(self, version: int) -> list[dict[str, Any] | None]:
        """Publish and have everybody fetch; the answers, ``None`` from the dead."""
        self.sender.ask("publish", version=version)
        for receiver in self.receivers:
            receiver.tell("update", version=version, timeout_s=90)
        return [receiver.answer() for receiver in self.receivers]

    def meet(self) -> None:
        """Version 1, for which nobody knew of anybody; then they do."""
        for answer in self.update(1):
            assert (answer["error"], answer["values"]) == ("", [1.0])
        for receiver in self.receivers:
            receiver.ask("peers", count=len(self.receivers))

    def feeders(self) -> dict[int, set[int]]:
        """By receiver who it was planned to take from: receivers, -1 for the sender."""
        names = [receiver.ask("planned") for receiver in self.receivers]
        return {
            rank: {int(name.split()[-1]) if name.startswith("receiver") else -1 for name in found}
            for rank, found in enumerate(names)
        }

    def close(self) -> None:
        for process in (self.sender, *self.receivers):
            process.close()
        self.directory.close()


@pytest.fixture
def group_of(zygote: Any) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def start(kind: dict[str, Any]) -> Group:
        groups.append(Group(zygote, **kind))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


@pytest.mark.slow
def test_a_chain_through_four_processes(group_of):
    group = group_of(CHAIN)
    group.meet()
    answers = group.update(2)
    assert [(a["error"], a["version"], a["values"]) for a in answers] == [("", 2, [2.0])] * 4
    # The sender feeds one, each of the others is fed by another one.
    assert sorted(_flat(group.feeders())) == [-1, 0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_fed", "message"),
    [
        (CHAIN, 1, 5),  # The chain below moves up to where the victim took from: a receiver.
        (CHAIN, 1, 150),
        (TREE, 2, 3),
        (TREE, 2, 120),  # It has most by then and has passed on some.
    ],
)
def test_a_relay_that_is_killed_costs_itself_only(group_of, kind, num_fed, message):
    group = group_of(kind)
    group.meet()
    count = kind["num_receivers"]
    assert [a["values"] for a in group.update(2)] == [[2.0]] * count
    fed = _flat(group.feeders())
    victim = next(relay for relay in reversed(range(count)) if fed.count(relay) == num_fed)
    group.receivers[victim].ask("die_at", message=message)
    answers = group.update(3)
    assert answers[victim] is None
    for rank, answer in enumerate(answers):
        if rank != victim:
            assert (answer["error"], answer["version"], answer["values"]) == ("", 3, [3.0]), rank
    # Those who are left make another plan for the next version.
    group.receivers.pop(victim).close()
    for receiver in group.receivers:
        receiver.ask("peers", count=count - 1)
    assert [a["values"] for a in group.update(4)] == [[4.0]] * (count - 1)


def _flat(feeders: dict[int, set[int]]) -> list[int]:
    return [feeder for found in feeders.values() for feeder in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize("message", [0, 2])
def test_changes_alone_survive_the_death_of_the_sender_that_tells_them(zygote, message):
    shapes = {"a": [500, 400], "b": [500, 400]}
    with WeightDirectory(lease_s=5.0) as directory:
        common = {"directory": directory.endpoint, "shapes": shapes}
        senders = [
            zygote.fork(role="sender", rank=rank, num_ranks=2, **common) for rank in range(2)
        ]
        config = {"reuse": "changes"}
        receiver = zygote.fork(role="receiver", rank=0, config=config, **common)
        total = 2 * 500 * 400 * 4
        try:
            for version, rows in ((1, 0), (2, 5)):
                for sender in senders:
                    sender.ask("publish", version=version, rows=rows)
                answer = receiver.ask("update", version=version, timeout_s=60)
                assert answer["error"] == ""
            assert answer["wire_bytes"] < total / 20
            senders[0].ask("die_at", message=message)
            for sender in senders:
                sender.tell("publish", version=3, rows=7)
                sender.answer()
            answer = receiver.ask("update", version=3, timeout_s=60)
            # What the dead one owed comes whole from the other; rows 7 on are of version 1.
            assert (answer["error"], answer["version"]) == ("", 3)
            assert answer["values"] == [1.0, 3.0]
            senders[1].ask("publish", version=4, rows=3)
            answer = receiver.ask("update", version=4, timeout_s=60)
            assert (answer["error"], answer["values"]) == ("", [1.0, 3.0, 4.0])
            assert answer["wire_bytes"] < total / 20  # Changes again, from the one that is left.
        finally:
            for process in (receiver, *senders):
                process.close()
