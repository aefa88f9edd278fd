"""``plan``: what a transfer between two layouts would move, before anything runs."""

from typing import Any

import click
import msgspec

from cosmos_weightsync.command_line.layouts import Sides, sides_arguments
from cosmos_weightsync.command_line.memory import available_bytes
from cosmos_weightsync.command_line.output import examples, report, show_errors, show_work
from cosmos_weightsync.command_line.topologies import TopologyOptions, topology_options
from cosmos_weightsync.plan_sizes import check_fits, plan_size
from cosmos_weightsync.planning import plan_transfer
from cosmos_weightsync.watching import Watch

__all__ = ["plan"]


@click.command(
    epilog=examples(
        "cosmos-weightsync plan trainer.msgpack engine.msgpack",
        "cosmos-weightsync plan ./Qwen3-8B --senders fsdp=8 --receivers tp=2,replicas=4",
        "cosmos-weightsync plan ./Qwen3-8B --senders fsdp=64 --receivers tp=8 --gpus-per-host 8",
        "cosmos-weightsync plan 16GB --receivers tp=4 --json",
    ),
    short_help="Who would send how much to whom, and the bound.",
)
@sides_arguments
@topology_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan(sides: Sides, place: TopologyOptions, as_json: bool) -> None:
    """Plan a transfer from layout SENDER to layout RECEIVER (default: the same tensors).

    A layout is a .json or .msgpack file, as Layout.to_json and to_msgpack write it; a safetensors
    directory, of which only headers are read; or a size such as 16GB. Without any option about
    hosts and links, nothing is known of them, and nobody passes anything on. A plan that would not
    fit into the memory there is ends with status 1 before it is made.
    """
    with show_errors():
        with show_work("planning", as_json=as_json) as watch:
            facts = _facts(sides, place, watch)
        report(facts, as_json=as_json)


def _facts(sides: Sides, place: TopologyOptions, watch: Watch) -> dict[str, Any]:
    offered, wanted = sides.layouts()
    ranks = offered.num_ranks, wanted.num_ranks
    topology = place.build(*ranks) if place.is_given else None
    size = plan_size(offered, wanted, topology)
    check_fits(size.num_pieces, size.num_bytes, available_bytes())
    planned = plan_transfer(offered, wanted, topology, watch=watch)
    watch("adding up", 1.0)
    stats = planned.stats()
    return {
        "sender_ranks": ranks[0],
        "receiver_ranks": ranks[1],
        **msgspec.to_builtins(stats),
        "times_the_bound": stats.ratio,
        "chunk_bytes": planned.chunk_bytes,
        "digest": planned.digest(),
    }
