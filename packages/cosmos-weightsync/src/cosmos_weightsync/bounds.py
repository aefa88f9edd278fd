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
    by_end = np.zeros(len(ends.hosts), dtype=np.int64)
    total = _Lacking(
        by_host=np.zeros(int(sites.hosts.max(initial=-1)) + 1, dtype=np.int64),
        by_card=np.zeros(int(sites.cards.max(initial=-1)) + 1, dtype=np.int64),
        by_end=by_end,
        inside=np.zeros_like(by_end),
        by_holders={},
    )
    rows_of: dict[bytes, list[int]] = {}
    for row, held in enumerate(demands.held):
        rows_of.setdefault(held.tobytes(), []).append(row)
    for rows in rows_of.values():
        _add_rows(total, demands, ends, rows, with_relays=with_relays)
    return total


def _add_rows(
    total: _Lacking, demands: Demands, ends: _Ends, rows: Sequence[int], *, with_relays: bool
) -> None:
    """Count what those lack who want some rows that the same ranks hold."""
    sites, held, num_bytes = demands.sites, demands.held[rows[0]], demands.num_bytes[rows]
    sets = [demands.wanted[row] for row in rows]
    wanted, row_of = np.concatenate(sets), np.repeat(np.arange(len(rows)), [*map(len, sets)])
    places = wanted + demands.num_senders
    is_far = ~np.isin(sites.hosts[places], sites.hosts[held])
    is_off_device = ~np.isin(sites.devices[places], sites.devices[held])
    far, far_row = places[is_far], row_of[is_far]
    np.add.at(total.by_card, sites.cards[far], num_bytes[far_row])
    by_row, hosts = _distinct_pairs(far_row, sites.hosts[far])
    np.add.at(total.by_host, hosts, num_bytes[by_row])
    by_row, off_ends = _distinct_pairs(row_of[is_off_device], ends.of_rank[wanted[is_off_device]])
    np.add.at(total.by_end, off_ends, num_bytes[by_row])
    num_far = np.bincount(far_row, minlength=len(rows))
    home = np.unique(sites.hosts[held])
    if len(home) == 1:
        is_inside = ends.hosts[off_ends] == home[0]
        if with_relays:
            is_inside &= num_far[by_row] == 0
        np.add.at(total.inside, off_ends[is_inside], num_bytes[by_row[is_inside]])
    copies = np.minimum(num_far, 1) if with_relays else num_far
    key = np.unique(sites.cards[held]).tobytes()
    total.by_holders[key] = total.by_holders.get(key, 0) + int((num_bytes * copies).sum())


def _distinct_pairs(rows: IntArray, values: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct pairs of a row and one of its values."""
    count = int(values.max(initial=0)) + 1
    return np.divmod(np.unique(rows * count + values), count)
