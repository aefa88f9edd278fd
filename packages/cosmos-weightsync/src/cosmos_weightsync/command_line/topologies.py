"""Where the ranks are and how fast their links, from options and a file."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import click

from cosmos_weightsync.command_line.options import bundled
from cosmos_weightsync.errors import TopologyError
from cosmos_weightsync.links import Links, check_names
from cosmos_weightsync.topology import Place, Topology

__all__ = ["TopologyOptions", "topology_options"]

_FILE_KEYS = ("senders", "receivers", "links", "relays", "chunk_bytes")
_DEFAULT_GPUS = 8
_MAX_CHUNK_MIB = 1 << 40  # No number of bytes is then too long for 64 bits.


@dataclass(frozen=True, slots=True)
class TopologyOptions:
    """What the options say; ``None`` for what they do not say."""

    topology_file: Path | None
    hosts: int | None
    gpus_per_host: int | None
    nics_per_host: int | None
    nic_gb_per_s: float | None
    host_gb_per_s: float | None
    latency_us: float | None
    piece_us: float | None
    chunk_mib: float | None
    relays: Literal["auto", "never"] | None

    @property
    def is_given(self) -> bool:
        """Whether anything is said at all."""
        return any(getattr(self, item.name) is not None for item in fields(self))

    def build(self, num_senders: int, num_receivers: int) -> Topology:
        """The topology of so many ranks; options count more than the file.

        Raises:
            TopologyError: the file or an option makes no sense.
        """
        data = _read(self.topology_file) if self.topology_file is not None else {}
        if ("senders" in data) != ("receivers" in data):
            raise TopologyError(f"{self.topology_file}: places of one side only")
        is_placed = "senders" in data
        placing = (self.hosts, self.gpus_per_host, self.nics_per_host)
        if is_placed and any(value is not None for value in placing):
            raise TopologyError(
                f"{self.topology_file} says where each rank is: leave --hosts, --gpus-per-host and "
                "--nics-per-host out, or 'senders' and 'receivers' out of the file"
            )
        places = {} if is_placed else self._placed(num_senders, num_receivers).to_json()
        topology = Topology.from_json({**places, "links": {}, **data})
        topology.check_ranks(num_senders, num_receivers)
        changes: dict[str, Any] = {"links": self._links(topology.links)}
        if self.chunk_mib is not None:
            if not 0 < self.chunk_mib < _MAX_CHUNK_MIB:
                raise TopologyError(f"--chunk-mib {self.chunk_mib}: must be above 0, and finite")
            changes["chunk_bytes"] = max(1, int(self.chunk_mib * (1 << 20)))
        if self.relays is not None:
            changes["relays"] = self.relays
        return replace(topology, **changes)

    def _placed(self, num_senders: int, num_receivers: int) -> Topology:
        gpus, nics = self.gpus_per_host or _DEFAULT_GPUS, self.nics_per_host or 0
        if self.hosts is None:
            return Topology.uniform(
                num_senders, num_receivers, gpus_per_host=gpus, cards_per_host=nics
            )
        needed, room = num_senders + num_receivers, self.hosts * gpus
        if needed > room:
            raise TopologyError(f"{needed} ranks on {self.hosts} hosts of {gpus}, for {room}")
        every = Topology.uniform(needed, 0, gpus_per_host=gpus, cards_per_host=nics).senders
        places = [Place(f"host-{i // gpus}", p.device, p.rail) for i, p in enumerate(every)]
        return Topology(
            senders=tuple(places[:num_senders]), receivers=tuple(places[num_senders:needed])
        )

    def _links(self, links: Links) -> Links:
        changes: dict[str, Any] = {}
        for kind, speed in (
            ("host", self.host_gb_per_s),
            ("rail", self.nic_gb_per_s),
            ("network", self.nic_gb_per_s),
        ):
            link = getattr(links, kind)
            if speed is not None:
                link = replace(link, bytes_per_s=speed * 1e9)
            if self.latency_us is not None:
                link = replace(link, latency_s=self.latency_us * 1e-6)
            if self.piece_us is not None:
                link = replace(link, piece_s=self.piece_us * 1e-6)
            changes[kind] = link
        return replace(links, **changes)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TopologyError(f"{path}: {error}") from error
    check_names(str(path), data, _FILE_KEYS)
    return data


def topology_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that describe hosts and links, as its argument ``place``."""
    options = (
        click.option(
            "--topology",
            "topology_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="A topology, as Topology.to_json writes it; or the links alone, as measured by "
            "benchmarks/planner.py --calibrate. The options below count more.",
        ),
        click.option(
            "--hosts",
            type=click.IntRange(1),
            help="Put all ranks on so many hosts, senders first; else each side has its own.",
        ),
        click.option(
            "--gpus-per-host", type=click.IntRange(1), help=f"Ranks a host [{_DEFAULT_GPUS}]."
        ),
        click.option(
            "--nics-per-host", type=click.IntRange(1), help="Network cards a host [one a GPU]."
        ),
        click.option("--nic-gb-per-s", type=float, help="GB/s a network card, each way [50]."),
        click.option("--host-gb-per-s", type=float, help="GB/s a GPU inside its host [450]."),
        click.option("--latency-us", type=float, help="Microseconds before a first byte [5]."),
        click.option(
            "--piece-us",
            type=float,
            help="Microseconds that each piece costs beside its bytes [0].",
        ),
        click.option(
            "--chunk-mib", type=float, help="MiB that a relay has before it passes on [chosen]."
        ),
        click.option(
            "--relays",
            type=click.Choice(["auto", "never"]),
            help="Whether receivers may pass on what they get [auto].",
        ),
    )
    return bundled(command, "place", TopologyOptions, options)
