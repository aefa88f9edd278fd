"""The time that no plan can beat, from bandwidths alone.

```
T >= max( unique bytes / cards of those who hold them,      each byte leaves its holders once
          bytes a host wants and lacks / its cards,         each byte enters a host once
          bytes a device lacks / (its cards + host links),  whichever way they come
          bytes that its own host alone has / host links,   for each device
          all such bytes of a host / what a host can do )   if there is a limit
```
Ranks of one device hand on what one of them has; and a byte that a receiver elsewhere wants as well
can come from there, over cards. Without relays every receiver counts as a host, and as a device, of
its own that only holders can serve.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.topology import Links, Sites

__all__ = ["Demands", "lower_bound"]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Demands:
    """Who holds and who wants how many bytes.

    Row i says that every rank of ``wanted[i]`` wants the same ``num_bytes[i]`` bytes, all of which
    every rank of ``held[i]`` has.

    Attributes:
        num_senders: Receiver rank r is holder ``num_senders + r``.
        held: Sets of holders.
        wanted: Sets of receiver ranks.
        num_bytes: Bytes of each row.
        sites: Where all holders sit.
        links: What the links can do.
    """

    num_senders: int
    held: Sequence[IntArray]
    wanted: Sequence[IntArray]
    num_bytes: IntArray
    sites: Sites
    links: Links


@dataclass(frozen=True, eq=False, slots=True)
class _Lacking:
    """What must be brought, summed in several ways; by end: see `_Ends`."""

    by_host: IntArray
    by_card: IntArray
    by_end: IntArray
    inside: IntArray
    by_holders: dict[bytes, int]


@dataclass(frozen=True, eq=False, slots=True)
class _Ends:
    """Where a byte must arrive once: with relays at a device, else at each rank.

    Attributes:
        of_rank: The number of each receiver rank's.
        num_ranks: How many ranks each has, with a link of the host each.
        num_cards: How many cards these use.
        hosts: Where each is.
    """

    of_rank: IntArray
    num_ranks: IntArray
    num_cards: IntArray
    hosts: IntArray

    @classmethod
    def of(cls, demands: Demands, *, with_relays: bool) -> "_Ends":
        """Those of the receivers."""
        sites, first = demands.sites, demands.num_senders
        devices, cards = sites.devices[first:], sites.cards[first:]
        places = devices if with_relays else np.arange(len(devices))
        _, where, of_rank = np.unique(places, return_index=True, return_inverse=True)
        used = np.unique(np.stack([of_rank, cards]), axis=1)[0]
        count = len(where)
        ranks, used = np.bincount(of_rank, minlength=count), np.bincount(used, minlength=count)
        return cls(of_rank, ranks, used, sites.hosts[first:][where])


def lower_bound(demands: Demands, *, with_relays: bool) -> float:
    """Seconds that the busiest link is busy in the best of all plans, at least.

    Args:
        demands: What is to be moved.
        with_relays: Whether receivers may pass on what they have.
    """
    ends = _Ends.of(demands, with_relays=with_relays)
    lacking = _lacking(demands, ends, with_relays=with_relays)
    links, sites = demands.links, demands.sites
    card = max(links.rail.bytes_per_s, links.network.bytes_per_s)
    cards_of_host = np.zeros(len(lacking.by_host), dtype=np.int64)
    _, where = np.unique(sites.cards, return_index=True)
    np.add.at(cards_of_host, sites.hosts[where], 1)
    total_out = sum(lacking.by_holders.values())
    held_cards = [np.frombuffer(key, dtype=np.int64) for key in lacking.by_holders]
    num_sending = len(np.unique(np.concatenate(held_cards))) if held_cards else 1
    times = [
        total_out / (num_sending * card),
        *(size / len(cards) / card for cards, size in _per_holders(lacking)),
    ]
    if with_relays:
        times.append(float((lacking.by_host / np.maximum(cards_of_host, 1)).max(initial=0)) / card)
        speeds = ends.num_cards * card + ends.num_ranks * links.host.bytes_per_s
        times.append(float((lacking.by_end / speeds).max(initial=0)))
    else:
        times.append(float(lacking.by_card.max(initial=0)) / card)
    times += _inside_times(lacking.inside, ends, links)
    return max(times)


def _inside_times(inside: IntArray, ends: _Ends, links: Links) -> list[float]:
    """Bytes that nobody outside of a host has come over the links inside it."""
    by_host = np.bincount(ends.hosts, weights=inside) if len(inside) else np.zeros(1)
    total = links.host_total_bytes_per_s or float("inf")
    return [
        float((inside / ends.num_ranks).max(initial=0)) / links.host.bytes_per_s,
        float(by_host.max(initial=0.0)) / total,
    ]


def _per_holders(lacking: _Lacking) -> list[tuple[IntArray, int]]:
    return [(np.frombuffer(key, dtype=np.int64), n) for key, n in lacking.by_holders.items()]


def _lacking(demands: Demands, ends: _Ends, *, with_relays: bool) -> _Lacking:
    sites = demands.sites
    by_host = np.zeros(int(sites.hosts.max(initial=-1)) + 1, dtype=np.int64)
    by_card = np.zeros(int(sites.cards.max(initial=-1)) + 1, dtype=np.int64)
    by_end = np.zeros(len(ends.hosts), dtype=np.int64)
    inside = np.zeros_like(by_end)
    by_holders: dict[bytes, int] = {}
    rows = zip(demands.held, demands.wanted, demands.num_bytes.tolist(), strict=True)
    for held, wanted, num_bytes in rows:
        places = wanted + demands.num_senders
        far = places[~np.isin(sites.hosts[places], sites.hosts[held])]
        off_device = wanted[~np.isin(sites.devices[places], sites.devices[held])]
        hosts = np.unique(sites.hosts[far])
        by_host[hosts] += num_bytes
        np.add.at(by_card, sites.cards[far], num_bytes)
        off_ends = np.unique(ends.of_rank[off_device])
        by_end[off_ends] += num_bytes
        home = np.unique(sites.hosts[held])
        if len(home) == 1 and not (with_relays and len(far)):
            inside[off_ends[ends.hosts[off_ends] == home[0]]] += num_bytes
        copies = min(len(hosts), 1) if with_relays else len(far)
        key = np.unique(sites.cards[held]).tobytes()
        by_holders[key] = by_holders.get(key, 0) + num_bytes * copies
    return _Lacking(by_host, by_card, by_end, inside, by_holders)
