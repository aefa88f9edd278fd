"""What one elastic replica does for all: one of those that are left does it, whoever dies."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cosmos_parallel import (
    Attendance,
    Attendee,
    ElasticConfig,
    ElasticReplicas,
    ParallelConfig,
    ReplicaLostError,
    build_mesh,
    open_store,
)


class Alive:
    """A membership in which some are alive, and nobody can meet: there is no quorum."""

    def __init__(self, name: str, alive: Callable[[str], bool]) -> None:
        self.name = name
        self._alive = alive

    def attend(self, me: Attendee) -> Attendance:
        raise ReplicaLostError(f"{me.name} is alone")

    def is_alive(self, name: str) -> bool:
        return self._alive(name)

    def close(self) -> None:
        pass


@pytest.fixture
def replica():
    host = open_store("127.0.0.1", 0, hosting=True)
    mesh = build_mesh(ParallelConfig())

    def opened(
        name: str, alive: Callable[[str], bool], *, timeout_s: float = 60.0
    ) -> ElasticReplicas:
        config = ElasticConfig(lease_s=0.3, timeout_s=timeout_s, min_replicas=2)
        store = open_store("127.0.0.1", host.port, hosting=False)
        return ElasticReplicas(Alive(name, alive), store, mesh, config)

    return opened


def test_one_does_it_at_once_and_the_others_return_when_it_is_done(replica):
    done = False
    first, second = (replica(name, lambda _: True) for name in "ab")
    assert first.claim("5", lambda: done)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: second.claim("5", lambda: done))
        time.sleep(0.5)
        assert not other.done()
        done = True
        assert other.result(timeout=10) is False
    assert second.claim("6", lambda: False), "another task"


def test_another_does_what_the_one_that_died_has_not_done(replica):
    assert replica("a", lambda _: True).claim("5", lambda: False)
    assert replica("b", lambda name: name != "a").claim("5", lambda: False)


def test_one_that_lives_and_does_not_get_there_is_waited_for_in_vain_only_so_long(replica):
    replica("a", lambda _: True).claim("5", lambda: False)
    other = replica("b", lambda _: True, timeout_s=0.5)
    with pytest.raises(ReplicaLostError, match=r"b waited 0\.5 s for a, which is alive .*: 5"):
        other.claim("5", lambda: False)


def test_what_has_to_be_done_once_is_done_once(replica):
    did: list[str] = []
    for name in "ab":
        replica(name, lambda _: True).once("export", lambda name=name: did.append(name))
    assert did == ["a"]


def test_what_one_died_at_is_done_by_another_that_waited(replica):
    """As by one that begins again under another name, or by a member that was waiting."""

    def dies() -> None:
        raise KeyboardInterrupt

    did: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        replica("a", lambda _: True).once("export", dies)
    replica("b", lambda name: name != "a").once("export", lambda: did.append("b"))
    replica("c", lambda _: True).once("export", lambda: did.append("c"))
    assert did == ["b"]


def test_who_waits_for_one_that_lives_leaves_it_to_that_when_its_time_is_up(replica):
    replica("a", lambda _: True).claim("export", lambda: False)
    did: list[str] = []
    before = time.monotonic()
    replica("b", lambda _: True, timeout_s=0.5).once("export", lambda: did.append("b"))
    assert did == []
    assert 0.4 < time.monotonic() - before < 20.0
