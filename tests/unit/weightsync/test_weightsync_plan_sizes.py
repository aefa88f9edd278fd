"""How large a plan would be: counted as the plan itself does, and refused where it does not fit."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cosmos_weightsync import (
    Box,
    Layout,
    PlanTooLargeError,
    ShardSpec,
    Topology,
    plan_transfer,
)
from cosmos_weightsync.command_line import main
from cosmos_weightsync.command_line.memory import available_bytes
from cosmos_weightsync.cuts import cut_layout, parse_cut
from cosmos_weightsync.plan_sizes import check_fits, plan_size

SHAPE = (4096, 2048)


def model(num_layers: int) -> Layout:
    names = [f"{i}.{kind}" for kind in ("q_proj", "o_proj") for i in range(num_layers)]
    return Layout.from_ranks([[ShardSpec(n, SHAPE, Box.full(SHAPE), "bfloat16") for n in names]])


MODEL = model(3)


@pytest.mark.parametrize(
    ("senders", "receivers"),
    [
        ("fsdp=8", "tp=3"),
        ("fsdp=7,tp=2", "tp=5,replicas=4"),
        ("fsdp=64", "replicas=10"),
        ("replicas=4,fsdp=3", "tp=2"),
        ("fsdp=100", "tp=100"),
    ],
)
def test_pieces_and_edges_are_counted_before_there_is_a_plan(senders, receivers):
    sides = cut_layout(MODEL, parse_cut(senders)), cut_layout(MODEL, parse_cut(receivers))
    size, stats = plan_size(*sides), plan_transfer(*sides).stats()
    assert size.num_pieces == pytest.approx(stats.num_pieces, rel=0.25)
    assert stats.num_edges <= size.num_edges


def test_receivers_of_a_host_that_take_turns_cut_pieces():
    sides = cut_layout(MODEL, parse_cut("fsdp=2")), cut_layout(MODEL, parse_cut("replicas=16"))
    topology = Topology.uniform(2, 16, gpus_per_host=8)
    # 6 tensors to 16 ranks, 2 pieces of 8 MiB each that are cut in 8.
    assert plan_transfer(*sides, topology).stats().num_pieces == 6 * 16 * 2 * 8
    assert plan_size(*sides, topology).num_pieces == 6 * 16 * 2 * 8
    assert plan_size(*sides).num_pieces == 6 * 16 * 2


@pytest.mark.parametrize(
    ("senders", "receivers", "gpus_per_host"),
    [
        ("fsdp=64", "replicas=100", 8),  # Entries take turns, and each is fed on its rail.
        ("fsdp=64", "replicas=100", 1),
        ("fsdp=64", "tp=8,replicas=32", 8),  # Of each slice a host has one.
        ("fsdp=16,tp=4", "tp=8,replicas=32", 8),
        ("fsdp=16,replicas=4", "tp=2,replicas=40", 8),
        ("replicas=16,fsdp=4", "replicas=64", 8),
        ("fsdp=4", "replicas=100", 4),
        ("fsdp=64", "tp=8", 8),
    ],
)
def test_edges_are_counted_as_they_come_about_by_passing_on(senders, receivers, gpus_per_host):
    """A plan that would fit is not refused for edges that it has not: at most twice as many."""
    deep = model(24)
    sides = cut_layout(deep, parse_cut(senders)), cut_layout(deep, parse_cut(receivers))
    ranks = sides[0].num_ranks, sides[1].num_ranks
    topology = Topology.uniform(*ranks, gpus_per_host=gpus_per_host)
    size, stats = plan_size(*sides, topology), plan_transfer(*sides, topology).stats()
    assert size.num_pieces == pytest.approx(stats.num_pieces, rel=0.25)
    assert 0.8 * stats.num_edges <= size.num_edges <= 2 * stats.num_edges


def test_boxes_that_overlap_make_no_more_pieces_than_their_edges_cut():
    rows = [(0, 6), (2, 8), (4, 10)]
    sides = [
        Layout.from_ranks([[ShardSpec("w", (10, 4), Box((a, 0), (b, 4)), "int8")] for a, b in side])
        for side in (rows, rows[::-1])
    ]
    size, stats = plan_size(*sides), plan_transfer(*sides).stats()
    assert size.num_pieces == 5  # Edges at 0, 2, 4, 6, 8 and 10.
    assert stats.num_pieces == 9  # Two of the five parts are of two ranks, one is of all three.


def test_nothing_takes_nothing():
    none = Layout(0, {}, ())
    assert plan_size(none, none).num_bytes == 0
    other = Layout.from_ranks([[ShardSpec("other", (4,), Box.full((4,)), "int8")]])
    assert plan_size(MODEL, other).num_pieces == 0


def test_a_plan_that_does_not_fit_says_how_large_it_would_be_and_what_to_do():
    check_fits(1_000, 2_000_000_000, 2_000_000_000)
    check_fits(1_000, 2_000_000_000, None)
    with pytest.raises(PlanTooLargeError) as error:
        check_fits(1_234_567, 2_000_000_000, 1_900_000_000)
    assert str(error.value) == (
        "a plan of about 1,234,567 pieces takes about 2.0 GB of memory, of which 1.9 GB are "
        "available: plan for fewer ranks or replicas, or cut both sides along the same dim"
    )


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_command_refuses_it_before_it_begins(command, tmp_path: Path):
    shape = (1 << 17, 1 << 17)
    whole = Layout.from_ranks([[ShardSpec("o_proj", shape, Box.full(shape), "bfloat16")]])
    path = tmp_path / "model.json"
    path.write_text(json.dumps(whole.to_json()))
    # Rows here and columns there: every sender has something for every receiver.
    cut = ("--senders", "fsdp=131072", "--receivers", "tp=131072")
    result = CliRunner().invoke(main, [command, str(path), *cut, "--json"])
    assert result.exit_code == 1
    assert "a plan of about 17,179,869,184 pieces takes about" in result.stderr
    assert "plan for fewer ranks" in result.stderr
    assert result.stdout == ""


def test_memory_is_the_least_that_anybody_allows(tmp_path: Path):
    meminfo, container, none = (tmp_path / name for name in ("meminfo", "max", "none"))
    meminfo.write_text("MemTotal:       24000000 kB\nMemAvailable:   3000 kB\n")
    assert available_bytes(meminfo, none) == 3000 << 10
    container.write_text("1048576\n")
    assert available_bytes(meminfo, container) == 1 << 20
    container.write_text("max\n")
    assert available_bytes(meminfo, container) == 3000 << 10
