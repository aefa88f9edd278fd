"""Who comes while others take a step waits for these, however long it is, and for nobody else."""

import json
import logging

import pytest
from torch._C._distributed_c10d import HashStore

from cosmos_parallel import (
    Attendance,
    Attendee,
    ElasticConfig,
    ElasticReplicas,
    ParallelConfig,
    ReplicaLostError,
    build_mesh,
)


class Asked:
    """A membership that answers each question for a quorum with what comes next.

    Attributes:
        alive: who shows signs of life.
    """

    def __init__(self, name: str, alive: set[str], *answers: tuple[str, ...] | None) -> None:
        self.name = name
        self.alive = alive
        self._answers = list(answers)

    def attend(self, me: Attendee) -> Attendance:
        names = self._answers.pop(0)
        if names is None:
            raise ReplicaLostError(f"{me.name} waited 600 s for a quorum")
        return Attendance(epoch=1, attendees=tuple(Attendee(name=name, step=9) for name in names))

    def is_alive(self, name: str) -> bool:
        return name in self.alive

    def close(self) -> None:
        """Nobody is left."""


def settled(asked: Asked, *, seated: list[str]) -> tuple[str, ...]:
    store = HashStore()
    store.set("seated", json.dumps([seated, []]))
    config = ElasticConfig(lease_s=0.01, timeout_s=0.01)
    replicas = ElasticReplicas(asked, store, build_mesh(ParallelConfig()), config)
    return replicas._settle(asked, Attendee(name=asked.name, step=0)).names


def test_a_newcomer_outwaits_a_step_longer_than_any_deadline_and_says_for_whom(caplog) -> None:
    """The Lighthouse gives no quorum to one of two who are alive, until the other asks too."""
    asked = Asked("new", {"old"}, None, None, None, ("new", "old"))
    with caplog.at_level(logging.WARNING):
        assert settled(asked, seated=["old"]) == ("new", "old")
    assert "new waits for old, who take a step" in caplog.messages


def test_several_newcomers_never_settle_apart_from_those_who_take_a_step() -> None:
    """More than half of all who are alive are given a quorum of their own, again and again."""
    apart = ("a", "b")
    asked = Asked("a", {"old"}, apart, apart, apart, apart, apart, ("a", "b", "old"))
    assert settled(asked, seated=["old"]) == ("a", "b", "old")


@pytest.mark.parametrize(
    ("alive", "seated"),
    [
        (set(), ["old"]),  # who took the step is dead
        ({"old"}, ["new", "old"]),  # one that sat with it, and does not get there: it hangs
    ],
)
def test_others_are_not_waited_for_beyond_the_deadline(alive: set[str], seated: list[str]) -> None:
    with pytest.raises(ReplicaLostError, match="new waited 600 s for a quorum"):
        settled(Asked("new", alive, None), seated=seated)
