"""The goals of planning, on what the benchmark plans: its time, and how near the bound it is."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cosmos_weightsync")

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from planner import PLANNING, PLANS, Case, planning_row

from cosmos_weightsync import plan_transfer

BOUNDS_S = [
    (0.188, 0.393),
    (0.644, 0.664),
    (2.566, 20.53),  # 1,026 GB by 8 cards of a host, or by the one of each rank.
    (0.843, 0.885),
    (1.175, 1.179),  # 470 GB by 8 cards of the senders.
    (1.543, 1.543),  # 1,234 GB by 16 cards of the receivers.
    (0.611, 14.66),  # 61 GB by 2 cards of the senders: once, or to the 24 on other hosts.
    (0.364, 5.817),  # 145 GB by 8 cards of the senders: once, or 16 times.
]
"""With relays and without, where a card has 50 GB/s."""


def title(value: object) -> str:
    return value.title if isinstance(value, Case) else str(value)


@pytest.mark.parametrize("case", PLANNING, ids=title)
def test_thousands_of_tensors_are_planned_in_the_time_that_was_asked(case: Case):
    row = planning_row(case, 3)
    assert row["tensors"] > 18_723
    assert case.target_s is not None
    assert row["plan_cpu_s"] < case.target_s
    assert row["peak_mib"] < 4096


@pytest.mark.parametrize(("case", "bounds_s"), [*zip(PLANS, BOUNDS_S, strict=True)], ids=title)
def test_the_busiest_link_of_each_known_transfer_is_near_the_bound(
    case: Case, bounds_s: tuple[float, float]
):
    senders, receivers, topology = case.build()
    for relays, bound_s in zip(("auto", "never"), bounds_s, strict=True):
        stats = plan_transfer(senders, receivers, replace(topology, relays=relays)).stats()
        assert stats.bound_s == pytest.approx(bound_s, rel=2e-3)
        assert 1 - 1e-9 <= stats.ratio < 1.1
