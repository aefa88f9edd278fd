"""How fast the links between ranks are: pure data, JSON in and out.

Two ranks meet over the best kind of link they share:

```
same device (a copy)  >  same host (NVLink, shared memory)  >  same rail  >  network
```
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cosmos_weightsync.errors import TopologyError

__all__ = ["LINK_KINDS", "Link", "Links"]

LINK_KINDS = ("device", "host", "rail", "network")
"""Names of the kinds of link, best first."""

_MOST = 1e30
_LEAST_BYTES_PER_S = 1 / _MOST


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link: n bytes in p pieces take ``latency_s + p * piece_s + n / bytes_per_s``.

    Attributes:
        bytes_per_s: What one end of it moves in one direction, whoever shares it.
        latency_s: From a request to the first byte.
        piece_s: What each piece costs beyond its bytes, packed or not, and each chunk of a large
            one; the ends are busy meanwhile.
        stream_bytes_per_s: The most that one rank takes from one other; ``None`` for no such limit.

    Raises:
        TopologyError: a bandwidth is not positive, a time is negative, or one is of a size that no
            plan can reckon with.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    piece_s: float = 0.0
    stream_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        speeds = (self.bytes_per_s, self.stream_bytes_per_s or self.bytes_per_s)
        times = (self.latency_s, self.piece_s)
        if not all(_LEAST_BYTES_PER_S <= speed <= _MOST for speed in speeds):
            raise TopologyError(
                f"a link needs bytes_per_s > 0, from {_LEAST_BYTES_PER_S:g} to {_MOST:g}, "
                f"not {self}"
            )
        if not all(0 <= time <= _MOST for time in times):
            raise TopologyError(
                f"a link needs latency_s and piece_s >= 0, at most {_MOST:g}, not {self}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What each kind of link can do, per rank and direction; the defaults are those of H100 nodes.

    Attributes:
        device: Between two ranks on one device.
        host: Between two devices of a host.
        rail: Between network cards of the same rail. Ranks that share a card share its bandwidth.
        network: Between network cards of different rails.
        registration_s_per_gib: What a rank pays, once, to register the memory it receives into.
        host_total_bytes_per_s: What all transfers inside one host can do together, where memory or
            processors are the limit; ``None`` for no such limit.
    """

    device: Link = Link(1.5e12, 1e-6)
    host: Link = Link(450e9, 3e-6)
    rail: Link = Link(50e9, 5e-6)
    network: Link = Link(50e9, 5e-6)
    registration_s_per_gib: float = 0.0
    host_total_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.registration_s_per_gib <= _MOST:
            raise TopologyError(
                f"registration_s_per_gib must be finite and not negative, at most {_MOST:g}"
            )
        if not _LEAST_BYTES_PER_S <= (self.host_total_bytes_per_s or 1.0) <= _MOST:
            raise TopologyError(
                f"host_total_bytes_per_s must be above 0, from {_LEAST_BYTES_PER_S:g} to "
                f"{_MOST:g}, or absent"
            )

    def by_kind(self) -> tuple[Link, Link, Link, Link]:
        """The links in the order of `LINK_KINDS`."""
        return self.device, self.host, self.rail, self.network

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Links":
        """Read a JSON object with any of the fields; what is not there is as by default.

        Raises:
            TopologyError: a name is not known, or a value makes no sense.
        """
        known = [item.name for item in fields(cls)]
        check_names("links", data, known)
        values: dict[str, Any] = {}
        for name, value in data.items():
            if name in LINK_KINDS:
                check_names(f"links.{name}", value, [item.name for item in fields(Link)])
                values[name] = _built(Link, f"links.{name}", value)
            else:
                values[name] = None if value is None else float(value)
        return _built(cls, "links", values)


def check_names(where: str, data: object, known: Iterable[str]) -> None:
    """Raise unless this is a JSON object with none but known names.

    Raises:
        TopologyError: it is not; it suggests the name that was meant.
    """
    known = list(known)
    if not isinstance(data, Mapping):
        raise TopologyError(f"{where}: an object with {', '.join(known)} is due, not {data!r}")
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise TopologyError(f"{where}: {name!r} is none of {', '.join(known)}{meant}")


def _built(kind: Any, where: str, values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise TopologyError(f"{where}: {error}") from error
