"""Long planning says how far it is, to a function or a terminal, and ends at Ctrl-C."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import cosmos_weightsync
from cosmos_weightsync import Topology, plan_transfer, simulate
from cosmos_weightsync.command_line.layouts import made_up_layout
from cosmos_weightsync.cuts import cut_layout, parse_cut
from cosmos_weightsync.watching import part_of, watched


def test_who_watches_is_told_what_is_done_and_how_much_of_it():
    told: list[tuple[str, float]] = []
    assert list(watched(range(4), "counting", lambda *news: told.append(news))) == [0, 1, 2, 3]
    assert told == [("counting", 0.0), ("counting", 0.25), ("counting", 0.5), ("counting", 0.75)]
    told.clear()
    part_of(lambda *news: told.append(news), 1, 4)("second", 0.5)
    assert told == [("second", 0.375)]


def test_many_items_cost_few_words():
    told: list[tuple[str, float]] = []
    for _ in watched(range(100_000), "counting", lambda *news: told.append(news)):
        pass
    assert len(told) == 100


def test_a_plan_and_its_simulation_are_the_same_with_somebody_watching():
    told: list[tuple[str, float]] = []
    layout = made_up_layout(1 << 30)
    sides = (
        cut_layout(layout, parse_cut("replicas=2,fsdp=4")),
        cut_layout(layout, parse_cut("tp=2,replicas=8")),
    )
    topology = Topology.uniform(8, 16)
    plan = plan_transfer(*sides, topology, watch=lambda *news: told.append(news))
    assert plan.digest() == plan_transfer(*sides, topology).digest()
    found = simulate(plan, watch=lambda *news: told.append(news))
    assert found.finish_s.tolist() == simulate(plan).finish_s.tolist()
    assert {"matching", "finding routes", "choosing senders", "simulating"} <= {w for w, _ in told}
    assert all(0 <= share <= 1 for _, share in told)


def test_ctrl_c_ends_a_long_plan_with_one_line():
    terminal, its_end = pty.openpty()
    arguments = ["plan", "16GB", "--senders", "fsdp=64", "--receivers", "tp=120000"]
    command = [sys.executable, "-m", "cosmos_weightsync", *arguments]
    source = str(Path(cosmos_weightsync.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its_end, env=environment)
    os.close(its_end)
    shown, is_asked, deadline = bytearray(), False, time.monotonic() + 60
    with contextlib.suppress(OSError):  # The terminal's end is gone.
        while part := os.read(terminal, 1 << 16):
            shown += part
            if not is_asked and b"planning: matching" in shown and b"%" in shown:
                process.send_signal(signal.SIGINT)
                is_asked = True
            assert time.monotonic() < deadline
    out, _ = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 130
    assert b"Interrupted." in shown
    assert b"Traceback" not in shown
    assert out == b""
