"""Links fitted to transfers that were simulated with known links give their times back."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from capabilities import skip_without
from click.testing import CliRunner

pytest.importorskip("cosmos_weightsync")

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from calibration import (
    CHUNK_BYTES,
    TRANSPORTS,
    Machine,
    Run,
    error_of,
    fit,
    links_of,
    plan_of,
    runs_of,
    tables,
    transports_here,
)

TRUE = {"bytes_per_s": 2e9, "stream": 1.2e9, "host_total": 3e9, "latency_s": 4e-3, "piece_s": 8e-5}
FITTED = [
    Run(8, 4, 1, False, True),
    Run(64, 4, 1, False, True),
    Run(64, 4, 3, False, True),
    Run(64, 4, 3, True, True),
    Run(8, 256, 1, False, True),
]
HELD_OUT = [Run(32, 4, 2, False, False), Run(32, 64, 2, True, False)]


@pytest.mark.slow
def test_runs_that_were_not_fitted_are_foretold():
    links = links_of(TRUE)
    found = links_of(fit([(run, run.simulated_s(links)) for run in FITTED]))
    for run in HELD_OUT:
        assert run.simulated_s(found) == pytest.approx(run.simulated_s(links), rel=0.05)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_is_measured_directly_and_where_it_passes_on_in_a_chain(
    machine: Machine, transport: str
) -> None:
    if transport not in transports_here():
        skip_without("nixl")
    is_chained = any(run.chained for run in runs_of(transport))
    assert is_chained == (transport in {"tcp", "process_group", "nixl"})
    for chained in {False, is_chained}:
        assert 0 < machine.seconds(Run(8, 4, 2, chained, True), transport, 1) < 60


def test_a_chain_is_one():
    streams = plan_of(Run(8, 4, 3, True, True)).streams()
    assert all(sorted(stream.parents.tolist()) == [-1, 1, 2] for stream in streams)


def test_a_stream_by_hand():
    # 64 MiB in 32 chunks of 2 MiB; the stream's limit binds, what pieces cost counts at its speed.
    seconds = 4e-3 + (64 << 20) / 1.2e9 + 32 * 8e-5
    assert Run(64, 4, 1, False, True).simulated_s(links_of(TRUE)) == pytest.approx(seconds)


def test_the_error_is_a_factor_whichever_way():
    assert error_of({"measured_s": 2.0, "simulated_s": 1.0}) == pytest.approx(1.0)
    assert error_of({"measured_s": 1.0, "simulated_s": 1.25}) == pytest.approx(0.25)


def test_the_tables_hold_every_run():
    row = {"transport": "tcp", "run": "a", "fitted": False, "measured_s": 1.0, "simulated_s": 1.1}
    text = tables([{**row, "links": TRUE}])
    assert "| tcp | 2.00 | 1.20 | 3.00 | 4.00 | 80.0 | 10% | 10% |" in text
    assert "| tcp | a | held out | 1.0000 | 1.1000 | 10% |" in text


def test_simulate_reads_the_links(tmp_path):
    from cosmos_weightsync.command_line import main

    path = tmp_path / "links-tcp.json"
    path.write_text(json.dumps({"links": links_of(TRUE).to_json(), "chunk_bytes": CHUNK_BYTES}))
    arguments = ["simulate", "64MB", "--topology", str(path), "--hosts", "1", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert json.loads(result.stdout)["seconds"] > 64e6 / 1.2e9
