"""Where every rank sits: pure data, JSON in and out.

A rank is on a host, has a device there and a rail, the network card it sends and receives through.
"""

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from cosmos_weightsync.errors import TopologyError
from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.links import LINK_KINDS, Link, Links, check_names

__all__ = ["LINK_KINDS", "Link", "Links", "Place", "Sites", "Topology"]

_COST_STEPS = 256


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank sits.

    Attributes:
        host: Name of its host.
        device: Number of its device on that host; two ranks with the same one share memory.
        rail: Number of the network card of that host which it uses.
    """

    host: str
    device: int = 0
    rail: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Sites:
    """A topology as arrays over holders (sender ranks, then receiver ranks)."""

    hosts: IntArray
    devices: IntArray
    cards: IntArray
    rails: IntArray

    def kinds(self, sources: IntArray, destinations: IntArray) -> IntArray:
        """For each pair of holders, the position in `LINK_KINDS` of the link between them."""
        is_host = self.hosts[sources] == self.hosts[destinations]
        is_device = self.devices[sources] == self.devices[destinations]
        is_rail = self.rails[sources] == self.rails[destinations]
        return np.where(is_device, 0, np.where(is_host, 1, np.where(is_rail, 2, 3)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Places of all ranks of both sides, and the links.

    Attributes:
        senders: Where sender rank 0, 1, ... sits.
        receivers: Where receiver rank 0, 1, ... sits.
        links: What the links can do.
        relays: ``auto``: a receiver passes on what it has when that is faster; ``never``: every
            receiver fetches everything from senders.
        chunk_bytes: A relay passes on what it has received in parts of this size; ``None`` lets the
            planner choose.

    Raises:
        TopologyError: a field makes no sense.
    """

    senders: tuple[Place, ...]
    receivers: tuple[Place, ...]
    links: Links = field(default_factory=Links)
    relays: Literal["auto", "never"] = "auto"
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.relays not in {"auto", "never"}:
            raise TopologyError(f"relays must be 'auto' or 'never', not {self.relays!r}")
        if self.chunk_bytes is not None and not self.chunk_bytes >= 1:
            raise TopologyError(f"chunk_bytes must be positive, not {self.chunk_bytes}")

    @classmethod
    def uniform(
        cls,
        num_senders: int,
        num_receivers: int,
        *,
        gpus_per_host: int = 8,
        cards_per_host: int = 0,
        links: Links | None = None,
    ) -> "Topology":
        """Ranks side by side on equal hosts, senders and receivers on different ones.

        Args:
            num_senders: Ranks of the sending side.
            num_receivers: Ranks of the receiving side.
            gpus_per_host: Ranks on each host.
            cards_per_host: Network cards on each host; by default as many as GPUs.
            links: What the links can do.
        """
        cards = cards_per_host or gpus_per_host
        if gpus_per_host < 1 or gpus_per_host % cards:
            raise TopologyError(f"{gpus_per_host} GPUs cannot share {cards} cards evenly")

        def side(name: str, count: int) -> tuple[Place, ...]:
            ranks = (divmod(rank, gpus_per_host) for rank in range(count))
            share = gpus_per_host // cards
            return tuple(Place(f"{name}-{host}", gpu, gpu // share) for host, gpu in ranks)

        return cls(
            senders=side("sender", num_senders),
            receivers=side("receiver", num_receivers),
            links=links or Links(),
        )

    @classmethod
    def from_hosts(
        cls, senders: Sequence[str], receivers: Sequence[str], *, links: Links | None = None
    ) -> "Topology":
        """From the host name of each rank; each rank of a host has a device and card of its own."""
        seen: dict[str, int] = {}

        def place(host: str) -> Place:
            number = seen.setdefault(host, 0)
            seen[host] += 1
            return Place(host, number, number)

        return cls(
            senders=tuple(place(host) for host in senders),
            receivers=tuple(place(host) for host in receivers),
            links=links or Links(),
        )

    @classmethod
    def this_host(
        cls, num_senders: int, num_receivers: int, *, links: Links | None = None
    ) -> "Topology":
        """All ranks on the machine this runs on, each with memory of its own."""
        here = socket.gethostname()
        return cls.from_hosts([here] * num_senders, [here] * num_receivers, links=links)

    @classmethod
    def separate(cls, num_senders: int, num_receivers: int) -> "Topology":
        """What is assumed when nothing is known: a host for every rank, and no relays."""
        return cls(
            senders=tuple(Place(f"sender-{rank}") for rank in range(num_senders)),
            receivers=tuple(Place(f"receiver-{rank}") for rank in range(num_receivers)),
            relays="never",
        )

    def check_ranks(self, num_senders: int, num_receivers: int) -> None:
        """Raise unless this places exactly so many ranks.

        Raises:
            TopologyError: it places more or fewer.
        """
        placed = (len(self.senders), len(self.receivers))
        if placed != (num_senders, num_receivers):
            raise TopologyError(
                f"the topology places {placed[0]} sender and {placed[1]} receiver ranks, the "
                f"layouts have {num_senders} and {num_receivers}"
            )

    def sites(self) -> Sites:
        """The places as arrays."""
        places = (*self.senders, *self.receivers)
        hosts: dict[str, int] = {}
        devices: dict[tuple[str, int], int] = {}
        cards: dict[tuple[str, int], int] = {}
        rows = [
            (
                hosts.setdefault(place.host, len(hosts)),
                devices.setdefault((place.host, place.device), len(devices)),
                cards.setdefault((place.host, place.rail), len(cards)),
                place.rail,
            )
            for place in places
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return Sites(table[:, 0], table[:, 1], table[:, 2], table[:, 3])

    def costs(self) -> IntArray:
        """Time per byte over each kind of link, in whole steps of 1/256 of the fastest's.

        Whole numbers, so that every machine plans alike whatever its floating-point unit does.
        """
        speeds = [link.bytes_per_s for link in self.links.by_kind()]
        steps = [min(round(_COST_STEPS * max(speeds) / speed), 1 << 24) for speed in speeds]
        return np.array(steps, dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `from_json` reads it back."""

        def side(places: tuple[Place, ...]) -> list[list[Any]]:
            return [[place.host, place.device, place.rail] for place in places]

        return {
            "senders": side(self.senders),
            "receivers": side(self.receivers),
            "links": self.links.to_json(),
            "relays": self.relays,
            "chunk_bytes": self.chunk_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Topology":
        """Read what `to_json` wrote; only the places must be there.

        Raises:
            TopologyError: the value is not a topology.
        """
        check_names("topology", data, (item.name for item in fields(cls)))
        given = {name: data[name] for name in ("relays", "chunk_bytes") if name in data}
        try:
            senders, receivers = (_places(data[side]) for side in ("senders", "receivers"))
            return cls(
                senders=senders,
                receivers=receivers,
                links=Links.from_json(data.get("links", {})),
                **given,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TopologyError(f"not a topology: {error!r}") from error

    def key(self) -> bytes:
        """Equal for equal topologies, and only for those."""
        return json.dumps(self.to_json(), sort_keys=True).encode()


def _places(rows: Iterable[Sequence[Any]]) -> tuple[Place, ...]:
    return tuple(Place(str(host), int(device), int(rail)) for host, device, rail in rows)
