"""Sources by a list of endpoints that somebody wrote down."""

from collections.abc import Collection, Iterable, Sequence

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.dialing import HolderDialer
from cosmos_weightsync.errors import ConfigurationError, TransferError
from cosmos_weightsync.frames import parse_endpoint
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.rosters import Found
from cosmos_weightsync.staging import Source, assign, assign_again, in_order

__all__ = ["ListedSources"]


class ListedSources:
    """A `cosmos_weightsync.rosters.Roster`: these and no others.

    Args:
        endpoints: Of every sender rank, or of receivers that have what is wanted, or of both. None
            yet: nobody is found.
        dialer: How to meet them.

    Raises:
        ConfigurationError: one is not of the form ``host:port``.
    """

    def __init__(self, endpoints: Iterable[str], dialer: HolderDialer) -> None:
        self._endpoints = tuple(endpoints)
        self._dialer = dialer
        self._known: list[Source] = []
        for endpoint in self._endpoints:
            parse_endpoint(endpoint)

    def find(self, at_least: int, deadline: Deadline) -> Found:
        """Meet everybody; they are waited for, whatever they have.

        Raises:
            ConfigurationError: a sender rank is missing from the list, or in it twice; or nobody
                is in it.
        """
        del at_least
        if not self._endpoints:
            raise ConfigurationError("'connect' this receiver to whom it is to fetch from first")
        met, unreachable = self._dialer.meet_all(self._endpoints, deadline)
        try:
            self._check(met, complete=not unreachable)
        except BaseException:
            for session in met:
                session.close()
            raise
        self._known = in_order(_source(session) for session in met)
        return Found(self._known, {session.endpoint: session for session in met}, unreachable)

    def instead(
        self, wanted: Sequence[ShardSpec], failed: Collection[str], version: int
    ) -> list[tuple[Source, Layout]]:
        """Plan over whoever else was met last.

        Raises:
            PlanError: they do not have all of it.
        """
        others = [source for source in self._known if source.endpoint not in failed]
        return assign_again(wanted, others, version)

    def assign(self, wanted: Sequence[ShardSpec], found: Found) -> list[tuple[Source, Layout]]:
        """Plan for this receiver alone.

        Raises:
            PlanError: those who were found do not have all of it.
        """
        return assign(wanted, found.sources)

    @property
    def chunk_bytes(self) -> None:
        """No limit: nobody waits for what this receiver gets."""

    def is_stale(self) -> bool:
        """Never: nobody else ever comes."""
        return False

    def suspect(self, endpoint: str, error: TransferError) -> None:
        """Of no consequence: everybody in the list is met anew each time."""

    def _check(self, met: Sequence[ReceiverSession], *, complete: bool) -> None:
        ranks = sorted(session.rank for session in met if session.role == "sender")
        if not ranks:
            return
        expected = list(range(next(s.num_ranks for s in met if s.role == "sender")))
        why = ""
        if len(self._endpoints) > len(set(self._endpoints)):
            why = ": one was given twice"
        elif len(ranks) > len(set(ranks)):
            why = ": several are of one rank; tell each sender its own by WeightSender(rank=...)"
        is_join = any(session.role == "receiver" for session in met)
        if why or (complete and not is_join and ranks != expected):
            raise ConfigurationError(
                f"endpoints of sender ranks {ranks} were given, the sender has ranks {expected}"
                + why
            )


def _source(session: ReceiverSession) -> Source:
    return Source(session.endpoint, session.name, session.layout, session.role, session.rank)
