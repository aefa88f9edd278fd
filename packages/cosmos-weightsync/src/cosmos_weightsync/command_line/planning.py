"""``plan``: what a transfer between two layouts would move, before anything runs."""

import json
from pathlib import Path
from typing import Any

import click
import msgspec

from cosmos_weightsync.command_line.output import examples, report, show_errors
from cosmos_weightsync.cuts import cut_layout, parse_cut
from cosmos_weightsync.errors import LayoutError
from cosmos_weightsync.files.checkpoints import read_checkpoint
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.planning import plan_transfer
from cosmos_weightsync.topology import Topology

__all__ = ["plan", "read_layout"]


def read_layout(where: str) -> Layout:
    """A layout in a ``.json`` or ``.msgpack`` file, or that of a safetensors directory.

    Raises:
        LayoutError: it is none of these.
    """
    path = Path(where)
    try:
        if path.suffix == ".msgpack":
            return Layout.from_msgpack(path.read_bytes())
        if path.suffix == ".json":
            return Layout.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise LayoutError(f"{where}: {error}") from error
    if "://" not in where and not path.exists():
        raise LayoutError(
            f"{where}: there is no such file or directory; give a layout (.json, .msgpack) or a "
            "safetensors checkpoint"
        )
    return read_checkpoint(where).layout()


@click.command(
    epilog=examples(
        "cosmos-weightsync plan trainer.msgpack engine.msgpack",
        "cosmos-weightsync plan ./Qwen3-8B --senders fsdp=8 --receivers tp=2,replicas=4",
        "cosmos-weightsync plan ./Qwen3-8B --senders fsdp=64 --receivers tp=8 --ranks-per-host 8",
        "cosmos-weightsync plan ./Qwen3-8B --receivers tp=4 --json",
    )
)
@click.argument("sender")
@click.argument("receiver", required=False)
@click.option("--senders", "sender_cut", metavar="CUT", help="Cut SENDER anew: fsdp=8,tp=2.")
@click.option("--receivers", "receiver_cut", metavar="CUT", help="Cut RECEIVER: tp=2,replicas=4.")
@click.option(
    "--ranks-per-host", default=0, help="Plan for equal hosts of so many ranks; a host each if 0."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan(
    sender: str,
    receiver: str | None,
    sender_cut: str,
    receiver_cut: str,
    ranks_per_host: int,
    as_json: bool,
) -> None:
    """Plan a transfer from layout SENDER to layout RECEIVER (default: the same tensors).

    A layout is a .json or .msgpack file, as Layout.to_json and to_msgpack write it, or a
    safetensors directory, of which only headers are read.
    """
    with show_errors():
        offered = read_layout(sender)
        wanted = read_layout(receiver) if receiver else offered
        if sender_cut:
            offered = cut_layout(offered, parse_cut(sender_cut))
        if receiver_cut:
            wanted = cut_layout(wanted, parse_cut(receiver_cut))
        report(_facts(offered, wanted, ranks_per_host), as_json=as_json)


def _facts(offered: Layout, wanted: Layout, ranks_per_host: int) -> dict[str, Any]:
    ranks = offered.num_ranks, wanted.num_ranks
    topology = Topology.uniform(*ranks, gpus_per_host=ranks_per_host) if ranks_per_host else None
    planned = plan_transfer(offered, wanted, topology)
    stats = planned.stats()
    return {
        "sender_ranks": ranks[0],
        "receiver_ranks": ranks[1],
        **msgspec.to_builtins(stats),
        "times_the_bound": stats.ratio,
        "digest": planned.digest(),
    }
