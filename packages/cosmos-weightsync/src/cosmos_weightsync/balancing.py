"""Sharing the work out: which of several holders sends a payload, and through which entry.

Greedy, largest payloads first, always to whoever is finished first with it; a batch of equal
payloads is shared out at once. All arithmetic is in whole numbers, so every machine decides alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.routing import NO_ENTRY, Fanout
from cosmos_weightsync.topology import Sites
from cosmos_weightsync.watching import Watch, unwatched, watched

__all__ = ["Balancer", "Work"]

_RAIL = 2

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """The payloads of one class of tensors: piece p of each of ``num_tensors`` equal tensors.

    Attributes:
        num_tensors: How many tensors are cut like this.
        sizes: Bytes of each piece.
        holders: Index of the set of holders of each piece.
        fanouts: Index of the routes of each piece.
    """

    num_tensors: int
    sizes: IntArray
    holders: IntArray
    fanouts: IntArray


class Balancer:
    """Knows how busy every network card is so far; used once.

    Args:
        works: All there is to move.
        holders: The sets of holders.
        fanouts: The routes.
        sites: Where all holders sit.
        costs: Time per byte by kind of link, in steps of `Topology.costs`.
        num_senders: Receiver rank r is holder ``num_senders + r``.
    """

    def __init__(
        self,
        works: Sequence[Work],
        *,
        holders: Sequence[IntArray],
        fanouts: Sequence[Fanout],
        sites: Sites,
        costs: IntArray,
        num_senders: int,
    ) -> None:
        self._works = works
        self._holders = holders
        self._fanouts = fanouts
        self._sites = sites
        self._costs = costs
        self._num_senders = num_senders
        num_cards = int(sites.cards.max(initial=-1)) + 1
        self._out = np.zeros(num_cards, dtype=np.int64)
        self._into = np.zeros(num_cards, dtype=np.int64)
        self._first_held = np.array([held[0] for held in holders], dtype=np.int64)
        self._firsts: list[IntArray] = []

    def choose_holders(self, watch: Watch = unwatched) -> list[IntArray]:
        """For each work, ``[num_tensors or 1, pieces]``: at which holder a payload begins.

        Payloads with one holder are settled first; the rest evens out the load they leave.
        """
        num_held = np.array([len(held) for held in self._holders], dtype=np.int64)
        num_feeds = np.array([fanout.num_feeds for fanout in self._fanouts], dtype=np.int64)
        is_open = [num_held[work.holders] > 1 for work in self._works]
        cost = int(self._costs[_RAIL])
        for work, undecided in zip(self._works, is_open, strict=True):
            lone = ~undecided
            cards = self._sites.cards[self._first_held[work.holders[lone]]]
            num_copies = num_feeds[work.fanouts[lone]] * work.num_tensors
            np.add.at(self._out, cards, work.sizes[lone] * num_copies * cost)
        self._firsts = _empty_choices(self._works, is_open)
        batches = _batches(self._works, is_open, by_holder=True)
        for index, pieces in watched(batches, "choosing senders", watch):
            work = self._works[index]
            held = self._holders[int(work.holders[pieces[0]])]
            fanout = self._fanouts[int(work.fanouts[pieces[0]])]
            size = int(work.sizes[pieces[0]])
            times = self._link_costs(held, fanout) * size
            cards = self._sites.cards[held]
            turn = _share_out(self._out[cards], times, len(pieces) * work.num_tensors)
            self._firsts[index][:, pieces] = turn.reshape(work.num_tensors, -1)
            _add_feeds(self._out, cards, turn, fanout.num_feeds, size * cost)
        return self._firsts

    def _link_costs(self, held: IntArray, fanout: Fanout) -> IntArray:
        """Time per byte from each holder to the entry, where there is only one it could be."""
        fed = np.flatnonzero(fanout.parents[0] < 0)
        if fanout.num_slots > 1 or len(fed) != 1:
            return np.full(len(held), self._costs[_RAIL])
        entry = np.full(len(held), self._num_senders + fanout.receivers[fed[0]])
        return self._costs[self._sites.kinds(held, entry)]

    def choose_slots(self, watch: Watch = unwatched) -> list[IntArray]:
        """For each work, ``[num_tensors or 1, pieces]``: the slot, which says who the entries are.

        Of equally good ones, that with the first entry on the rail of the holder. To be called
        after `choose_holders`.
        """
        num_slots = np.array([fanout.num_slots for fanout in self._fanouts], dtype=np.int64)
        is_open = [num_slots[work.fanouts] > 1 for work in self._works]
        settled = np.zeros(len(self._fanouts), dtype=np.int64)
        for work, undecided in zip(self._works, is_open, strict=True):
            time = work.sizes * work.num_tensors * int(self._costs[_RAIL])
            np.add.at(settled, work.fanouts[~undecided], time[~undecided])
        for fanout in watched(np.flatnonzero(settled).tolist(), "adding up loads", watch):
            self._add_entries(fanout, settled[fanout : fanout + 1])
        slots = _empty_choices(self._works, is_open)
        batches = _batches(self._works, is_open, by_holder=False)
        for index, pieces in watched(batches, "choosing entries", watch):
            work, fanout = self._works[index], int(self._works[index].fanouts[pieces[0]])
            time = int(work.sizes[pieces[0]]) * int(self._costs[_RAIL])
            load = self._entry_load(fanout)
            turn = _share_out(load, np.full(len(load), time), len(pieces) * work.num_tensors)
            liked = self._slots_on_rail(index, pieces)
            slots[index][:, pieces] = _reorder(turn, liked).reshape(work.num_tensors, -1)
            self._add_entries(fanout, np.bincount(turn, minlength=len(load)) * time)
        return slots

    def _entry_load(self, fanout: int) -> IntArray:
        """For each slot, how busy the busiest of its entries is."""
        entries = self._fanouts[fanout].entries
        load = self._into[self._sites.cards[entries + self._num_senders]]
        return np.where(entries == NO_ENTRY, 0, load).max(axis=1)

    def _add_entries(self, fanout: int, times: IntArray) -> None:
        entries = self._fanouts[fanout].entries
        is_entry = entries != NO_ENTRY
        cards = self._sites.cards[entries[is_entry] + self._num_senders]
        np.add.at(self._into, cards, np.broadcast_to(times[:, None], entries.shape)[is_entry])

    def _slots_on_rail(self, index: int, pieces: IntArray) -> IntArray:
        """For each payload of a batch, the slot whose first entry is on its holder's rail, or -1.

        Only looks at payloads that have one holder: the rail of others is not worth the search.
        """
        work = self._works[index]
        fanout = self._fanouts[int(work.fanouts[pieces[0]])]
        fed = np.flatnonzero(fanout.entries[0] != NO_ENTRY)
        if not len(fed):
            return np.full(work.num_tensors * len(pieces), -1)
        rails = self._sites.rails[fanout.entries[:, fed[0]] + self._num_senders]
        of_holder = self._sites.rails[self._first_held[work.holders[pieces]]]
        is_match = rails[:, None] == of_holder[None, :]
        liked = np.where(is_match.any(axis=0), is_match.argmax(axis=0), -1)
        return np.tile(liked, work.num_tensors)


def _empty_choices(works: Sequence[Work], is_open: Sequence[Mask]) -> list[IntArray]:
    """All zeros; a single row, which holds for every tensor, where nothing is undecided."""
    return [
        np.zeros((work.num_tensors if undecided.any() else 1, len(work.sizes)), dtype=np.int64)
        for work, undecided in zip(works, is_open, strict=True)
    ]


def _batches(
    works: Sequence[Work], is_open: Sequence[Mask], *, by_holder: bool
) -> list[tuple[int, IntArray]]:
    """Undecided pieces that are alike, as (work, pieces), the largest first."""
    found: list[tuple[int, int, IntArray]] = []
    for index, (work, undecided) in enumerate(zip(works, is_open, strict=True)):
        pieces = np.flatnonzero(undecided)
        if not len(pieces):
            continue
        keys = np.stack([work.fanouts[pieces], work.sizes[pieces]], axis=1)
        if by_holder:
            keys = np.concatenate([keys, work.holders[pieces][:, None]], axis=1)
        unique, inverse = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(inverse.ravel(), kind="stable")
        cuts = np.searchsorted(inverse.ravel()[order], np.arange(1, len(unique)))
        found += [
            (int(key[1]), index, pieces[part])
            for key, part in zip(unique, np.split(order, cuts), strict=True)
        ]
    found.sort(key=lambda item: -item[0])
    return [(index, pieces) for _, index, pieces in found]


def _add_feeds(load: IntArray, cards: IntArray, turn: IntArray, feeds: int, time: int) -> None:
    """A payload that begins at holder i is sent by holders i, i + 1, ... as often as needed."""
    starts = np.bincount(turn, minlength=len(cards))
    whole, rest = divmod(feeds, len(cards))
    counts = np.full(len(cards), whole * len(turn), dtype=np.int64)
    for step in range(rest):
        counts += np.roll(starts, step)
    np.add.at(load, cards, counts * time)


def _share_out(load: IntArray, times: IntArray, count: int) -> IntArray:
    """Hand out ``count`` equal payloads one by one, each to who is finished first with it.

    Args:
        load: Time that each is busy already.
        times: Time of one payload at each.
        count: How many payloads.

    Returns:
        Who gets payload 0, 1, ...
    """
    times = np.maximum(times, 1)
    rounds = min(count, -(-count // len(load)) + int((load.max() - load.min()) // times.min()) + 1)
    levels = load[:, None] + times[:, None] * np.arange(1, rounds + 1)[None, :]
    turn = np.argsort(levels.T.ravel(), kind="stable")[:count]
    return turn % len(load)


def _reorder(turn: IntArray, liked: IntArray) -> IntArray:
    """The same shares as in ``turn``, with as many payloads as possible where they like it."""
    chosen = np.full(len(turn), -1, dtype=np.int64)
    left = np.bincount(turn, minlength=int(liked.max(initial=0)) + 1)
    for slot in range(len(left)):
        happy = np.flatnonzero(liked == slot)[: left[slot]]
        chosen[happy] = slot
        left[slot] -= len(happy)
    chosen[chosen < 0] = np.repeat(np.arange(len(left)), left)
    return chosen
