"""The time that no plan can beat, from bandwidths alone.

```
T >= max( unique bytes / cards of those who hold them,      each byte leaves its holders once
          bytes a host wants and lacks / its cards,         each byte enters a host once
          bytes a rank lacks / (card + host link),          whichever way they come
          bytes all hosts lack / cards of everybody,        somebody sends each of them
          bytes that only its own host has / host link,     for each rank
          all such bytes of a host / what a host can do )   if there is a limit
```
Without relays every receiver counts as a host of its own that only holders can serve.
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
    """What the network must bring, summed in several ways."""

    by_host: IntArray
    by_card: IntArray
    by_rank: IntArray
    inside: IntArray
    by_holders: dict[bytes, int]


def lower_bound(demands: Demands, *, with_relays: bool) -> float:
    """Seconds that the busiest link is busy in the best of all plans, at least.

    Args:
        demands: What is to be moved.
        with_relays: Whether receivers may pass on what they have.
    """
    lacking = _lacking(demands, with_relays=with_relays)
    links, sites = demands.links, demands.sites
    card = max(links.rail.bytes_per_s, links.network.bytes_per_s)
    cards_of_host = np.zeros(len(lacking.by_host), dtype=np.int64)
    unique_cards, where = np.unique(sites.cards, return_index=True)
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
        times.append(float(lacking.by_rank.max(initial=0)) / (card + links.host.bytes_per_s))
        times.append(float(lacking.by_host.sum()) / (max(len(unique_cards), 1) * card))
    else:
        times.append(float(lacking.by_card.max(initial=0)) / card)
    times += _inside_times(lacking.inside, demands)
    return max(times)


def _inside_times(inside: IntArray, demands: Demands) -> list[float]:
    """Bytes that nobody outside a rank's host has come over the links inside it."""
    links, sites = demands.links, demands.sites
    hosts = sites.hosts[demands.num_senders :]
    by_host = np.bincount(hosts, weights=inside) if len(inside) else np.zeros(1)
    total = links.host_total_bytes_per_s or float("inf")
    return [
        float(inside.max(initial=0)) / links.host.bytes_per_s,
        float(by_host.max(initial=0.0)) / total,
    ]


def _per_holders(lacking: _Lacking) -> list[tuple[IntArray, int]]:
    return [(np.frombuffer(key, dtype=np.int64), n) for key, n in lacking.by_holders.items()]


def _lacking(demands: Demands, *, with_relays: bool) -> _Lacking:
    sites = demands.sites
    by_host = np.zeros(int(sites.hosts.max(initial=-1)) + 1, dtype=np.int64)
    by_card = np.zeros(int(sites.cards.max(initial=-1)) + 1, dtype=np.int64)
    by_rank = np.zeros(len(sites.hosts) - demands.num_senders, dtype=np.int64)
    inside = np.zeros_like(by_rank)
    by_holders: dict[bytes, int] = {}
    rows = zip(demands.held, demands.wanted, demands.num_bytes.tolist(), strict=True)
    for held, wanted, num_bytes in rows:
        places = wanted + demands.num_senders
        far = places[~np.isin(sites.hosts[places], sites.hosts[held])]
        off_device = wanted[~np.isin(sites.devices[places], sites.devices[held])]
        hosts = np.unique(sites.hosts[far])
        by_host[hosts] += num_bytes
        np.add.at(by_card, sites.cards[far], num_bytes)
        by_rank[off_device] += num_bytes
        home = np.unique(sites.hosts[held])
        if len(home) == 1:
            here = sites.hosts[off_device + demands.num_senders] == home[0]
            inside[off_device[here]] += num_bytes
        copies = min(len(hosts), 1) if with_relays else len(far)
        key = np.unique(sites.cards[held]).tobytes()
        by_holders[key] = by_holders.get(key, 0) + num_bytes * copies
    return _Lacking(by_host, by_card, by_rank, inside, by_holders)
