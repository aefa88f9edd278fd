"""How one payload gets from its holders to all receivers that want it: a pure function.

Receivers are taken host by host. A host on which a holder sits is served by that holder. Of every
other host one receiver, the *entry*, takes the payload over the network and its neighbours take it
from the entry. Which receiver is the entry rotates from payload to payload by a number, the *slot*,
so that all network cards of a host are used. Hosts form chains or trees, fed by the holders:

```
holders ─┬─► host 0 ─► host 2 ─► host 4        feeds 2, arity 1: two chains
         └─► host 1 ─► host 3
holders ───► host 0 ─┬─► host 1 ─► ...         feeds 1, arity 2: a binary tree
                     └─► host 2 ─► ...
holders ─┬─► host 0                            feeds = number of hosts: direct, no relays
         └─► host 1 ...
```
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.topology import Sites

__all__ = ["NO_ENTRY", "Fanout", "HolderSets", "HostGroups", "Shape", "tree_depth"]

NO_ENTRY = -1


@dataclass(frozen=True, slots=True)
class Shape:
    """A forest over hosts: ``feeds`` of them fed by holders, each relay feeding up to ``arity``."""

    feeds: int
    arity: int


def tree_depth(num_hosts: int, shape: Shape) -> int:
    """Hops from the holders to the farthest host."""
    depth, level, reached = 0, shape.feeds, 0
    while reached < num_hosts:
        if shape.arity == 1:
            return depth + -(-(num_hosts - reached) // level)
        reached += level
        level *= shape.arity
        depth += 1
    return depth


@dataclass(frozen=True, eq=False, slots=True)
class Fanout:
    """The routes to one set of receivers.

    Attributes:
        receivers: Their ranks, ascending.
        parents: ``parents[slot, i]`` is where ``receivers[i]`` takes a payload of this slot from:
            a holder's number, or ``-1 - k`` for the k-th holder from the one the payload begins
            at.
        num_feeds: How many receivers take a payload from holders in that way.
        entries: ``entries[slot, host]`` is the receiver rank that takes the payload over the
            network for its host; `NO_ENTRY` where a holder is on the host.
    """

    receivers: IntArray
    parents: IntArray
    num_feeds: int
    entries: IntArray

    @property
    def num_slots(self) -> int:
        """Into how many ways payloads can be told apart."""
        return len(self.parents)


class HolderSets:
    """Sets of holders one after another, to look many up at once.

    Args:
        sets: None of them empty.
    """

    def __init__(self, sets: Sequence[IntArray]) -> None:
        self._flat = np.concatenate([np.zeros(0, dtype=np.int64), *sets])
        self._counts = np.array([len(held) for held in sets], dtype=np.int64)
        self._begins = np.cumsum(self._counts) - self._counts

    def at(self, sets: IntArray, turn: IntArray) -> IntArray:
        """Of each of these sets the holder whose turn it is; after the last comes the first."""
        return self._flat[self._begins[sets] + turn % self._counts[sets]]


class HostGroups:
    """The receivers of one payload, host by host, each host's in order of their rails.

    Args:
        receivers: Ranks, ascending.
        hosts: The host of each of them.
        local: Holders that sit on the hosts of these receivers; may be empty.
        sites: Where all holders sit.
        num_senders: Receiver rank r is holder ``num_senders + r``.

    Attributes:
        num_remote: On how many of the hosts no holder sits.
        remote_hosts: Which these are.
    """

    def __init__(
        self,
        receivers: IntArray,
        hosts: IntArray,
        local: IntArray,
        sites: Sites,
        num_senders: int,
    ) -> None:
        order = np.lexsort((receivers, sites.rails[receivers + num_senders], hosts))
        self._receivers = receivers
        self._local = local
        self._sites = sites
        self._num_senders = num_senders
        self._order = order
        self._hosts, self._first, self._count = np.unique(
            hosts[order], return_index=True, return_counts=True
        )
        self._is_remote = np.ones(len(self._hosts), dtype=bool)
        if len(local):
            self._is_remote = ~np.isin(self._hosts, sites.hosts[local])
        self.remote_hosts = self._hosts[self._is_remote]
        self.num_remote = len(self.remote_hosts)

    def route(self, shape: Shape) -> Fanout:
        """The routes when the hosts without a holder form this forest."""
        num_slots = int(self._count[self._is_remote].max(initial=1))
        slots = np.arange(num_slots)[:, None]
        position = self._first[None, :] + slots % self._count[None, :]
        entry = self._receivers[self._order[position]]
        host_of = np.repeat(np.arange(len(self._count)), self._count)
        # Everybody takes from the entry of the host; what concerns entries is put right below.
        ordered = entry[:, host_of] + self._num_senders
        feeds = min(shape.feeds, self.num_remote)
        remote = np.flatnonzero(self._is_remote)
        for rank, host in enumerate(remote.tolist()):
            upstream = (
                np.full(num_slots, -1 - rank)
                if rank < feeds
                else entry[:, remote[(rank - feeds) // shape.arity]] + self._num_senders
            )
            ordered[np.arange(num_slots), position[:, host]] = upstream
        for host in np.flatnonzero(~self._is_remote).tolist():
            members = self._first[host] + np.arange(self._count[host])
            nearest = self._nearest(self._order[members], int(self._hosts[host]))
            ordered[:, members] = nearest[None, :]
        parents = np.empty_like(ordered)
        parents[:, self._order] = ordered
        return Fanout(
            receivers=self._receivers,
            parents=parents,
            num_feeds=feeds,
            entries=np.where(self._is_remote[None, :], entry, NO_ENTRY),
        )

    def _nearest(self, members: IntArray, host: int) -> IntArray:
        """For receivers of one host, a holder on it each: on the same device, or in turn."""
        places = self._receivers[members] + self._num_senders
        here = self._local[self._sites.hosts[self._local] == host]
        chosen = here[np.arange(len(members)) % len(here)]
        for index, place in enumerate(places.tolist()):
            same = here[self._sites.devices[here] == self._sites.devices[place]]
            if len(same):
                chosen[index] = same[0]
        return chosen
