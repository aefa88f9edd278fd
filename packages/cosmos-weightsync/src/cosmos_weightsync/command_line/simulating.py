"""``simulate``: how long a transfer between two layouts would take, deaths included."""

import re
from pathlib import Path
from typing import Any

import click

from cosmos_weightsync.command_line.figures import draw_timeline
from cosmos_weightsync.command_line.layouts import Sides, sides_arguments
from cosmos_weightsync.command_line.memory import available_bytes
from cosmos_weightsync.command_line.output import (
    echo_table,
    examples,
    human_bytes,
    report,
    show_errors,
    show_work,
)
from cosmos_weightsync.command_line.topologies import TopologyOptions, topology_options
from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.plan_sizes import check_fits, plan_size
from cosmos_weightsync.planning import TransferPlan, plan_transfer
from cosmos_weightsync.simulation import Failure, Simulation, simulate

__all__ = ["parse_failure", "simulate_command"]

_FAILURE = re.compile(r"(sender|receiver):(\d+)@(\d+(?:\.\d*)?(?:e-?\d+)?)")
_SHOWN = 24


def parse_failure(text: str, num_senders: int, num_receivers: int) -> Failure:
    """``receiver:3@0.5``: receiver rank 3 dies after half a second.

    Raises:
        ConfigurationError: it is not of that form, or there is no such rank.
    """
    match = _FAILURE.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"{text!r}: write receiver:3@0.5 or sender:0@1.25")
    side, rank, at_s = match[1], int(match[2]), float(match[3])
    count = num_senders if side == "sender" else num_receivers
    if rank >= count:
        raise ConfigurationError(f"{text!r}: {side} ranks are 0 to {count - 1}")
    return Failure(holder=rank if side == "sender" else num_senders + rank, at_s=at_s)


@click.command(
    "simulate",
    epilog=examples(
        "cosmos-weightsync simulate 140GB --senders fsdp=8 --receivers tp=8,replicas=16",
        "cosmos-weightsync simulate ./Qwen3-8B --senders fsdp=8 --receivers tp=2,replicas=4 \\",
        "    --nics-per-host 2 --nic-gb-per-s 25 --fail receiver:0@0.05 --detect-s 0.2",
        "cosmos-weightsync simulate trainer.msgpack engine.msgpack --topology cluster.json",
        "cosmos-weightsync simulate 16GB --receivers replicas=4 --figure timeline.png",
    ),
    short_help="How long a transfer would take, event by event.",
)
@sides_arguments
@topology_options
@click.option(
    "--fail",
    "deaths",
    multiple=True,
    metavar="RANK@SECONDS",
    help="Somebody dies: receiver:3@0.5 or sender:0@1.25. May be repeated.",
)
@click.option(
    "--detect-s",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds until others notice a death.",
)
@click.option(
    "--figure",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the timeline (.png, .svg, .pdf); needs the extra [figure].",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def simulate_command(
    sides: Sides,
    place: TopologyOptions,
    deaths: tuple[str, ...],
    detect_s: float,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Plan a transfer from SENDER to RECEIVER and play it through, event by event.

    SENDER and RECEIVER are as for 'plan': layouts, checkpoints or a size such as 16GB, cut by
    --senders and --receivers. Hosts and links are those of --topology or of the options, by default
    hosts of 8 GPUs with NVLink and a 400 Gbit/s network card each.

    Shown are the busiest links, when each receiver has everything, and the time that no plan can
    beat (the bound). Ends with status 1 if a living receiver never gets everything.
    """
    with show_errors():
        with show_work("planning and simulating", as_json=as_json) as watch:
            offered, wanted = sides.layouts()
            ranks = offered.num_ranks, wanted.num_ranks
            failures = [parse_failure(text, *ranks) for text in deaths]
            topology = place.build(*ranks)
            size = plan_size(offered, wanted, topology)
            check_fits(size.num_pieces, size.simulated_bytes, available_bytes())
            plan = plan_transfer(offered, wanted, topology, watch=watch)
            found = simulate(plan, failures=failures, detect_s=detect_s, watch=watch)
            facts = _facts(plan, found)
        if figure is not None:
            draw_timeline(found, figure, bound_s=plan.lower_bound(), failures=failures)
        if as_json:
            report(_in_full(facts, found), as_json=True)
        else:
            _show(facts, found)
    if not found.recovered:
        raise SystemExit(1)


def _facts(plan: TransferPlan, found: Simulation) -> dict[str, Any]:
    stats = plan.stats()
    return {
        "sender_ranks": plan.num_senders,
        "receiver_ranks": plan.num_receivers,
        "total_bytes": stats.total_bytes,
        "relayed_bytes": stats.relayed_bytes,
        "cross_host_bytes": stats.cross_host_bytes,
        "seconds": found.seconds,
        "chunk_bytes": plan.chunk_bytes,
        "bound_s": stats.bound_s,
        "times_the_bound": found.seconds / stats.bound_s if stats.bound_s else 1.0,
        "recovered": found.recovered,
        "events": found.num_events,
        "digest": plan.digest(),
    }


def _in_full(facts: dict[str, Any], found: Simulation) -> dict[str, Any]:
    """With a line for everything, and no infinity, which JSON does not have."""
    finish = [value if value < float("inf") else None for value in found.finish_s.tolist()]
    finite = {key: None if value == float("inf") else value for key, value in facts.items()}
    links = [
        {"link": name, "busy_s": share * found.end_s, "share": share} for name, share in found.busy
    ]
    return {**finite, "dead": list(found.dead), "finish_s": finish, "links": links}


def _show(facts: dict[str, Any], found: Simulation) -> None:
    report(facts, as_json=False)
    links = [(name, f"{share * found.end_s:.4g}", f"{share:.0%}") for name, share in found.busy]
    echo_table(("busiest links", "busy s", "of the time"), links)
    by_receiver = [0.0] * len(found.finish_s)
    for span in found.spans:
        by_receiver[span.receiver] += span.num_bytes
    rows = [
        (str(rank), _when(found, rank), human_bytes(by_receiver[rank]))
        for rank in found.sample(_SHOWN)
    ]
    echo_table(("receiver", "has everything", "took"), rows)
    click.echo(found.picture(rows=_SHOWN))


def _when(found: Simulation, rank: int) -> str:
    if not found.lives(rank):
        return "died"
    end = float(found.finish_s[rank])
    return "never" if end == float("inf") else f"{end:.4g} s"
