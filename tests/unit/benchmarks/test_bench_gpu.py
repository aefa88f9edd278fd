"""What benchmarks/gpu.py makes of what its parts print, and of parts that fail or are late."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from gpu import (
    PARTS,
    Part,
    near_a_copy,
    near_bfloat16,
    near_torchtitan,
    rows_of,
    run_part,
    section,
    spares_memory,
)
from run import RESULTS, replace_section

COPIES = """noise
| work | ms | GB/s | of copy |
|---|---|---|---|
| copy | 1.00 | 2400 | 1.00 |
| pack half of the columns | 1.00 | 2000 | {pack} |
| read over CUDA IPC | 1.00 | 2000 | {ipc} |
"""


@pytest.mark.parametrize(
    ("pack", "ipc", "holds"),
    [("0.80", "0.84", True), ("0.79", "0.84", False), ("0.90", "0.83", False)],
)
def test_packing_has_four_fifths_of_a_copy_and_ipc_takes_a_fifth_longer(pack, ipc, holds):
    assert near_a_copy(rows_of(COPIES.format(pack=pack, ipc=ipc))) is holds


@pytest.mark.parametrize(
    ("ratio", "loss", "holds"),
    [("0.970", "7.67", True), ("0.969", "7.67", False), ("1.1", "9.9", False)],
)
def test_training_has_97_hundredths_of_torchtitans_on_the_same_step(ratio, loss, holds):
    table = "| step | x torchtitan | first loss |\n|---|---|---|\n| torchtitan | 1.000 | 7.66 |\n"
    assert near_torchtitan(rows_of(f"{table}| cosmos | {ratio} | {loss} |\n")) is holds


@pytest.mark.parametrize(
    ("share", "loss", "holds"),
    [("0.30", "7.6604", True), ("0.85", "7.66", False), ("0.30", "7.70", False)],
)
def test_activations_that_are_not_kept_spare_memory_and_change_no_loss(share, loss, holds):
    table = "| activations | of kept | last loss |\n|---|---|---|\n| kept | 1.00 | 7.66 |\n"
    assert spares_memory(rows_of(f"{table}| recomputed | {share} | {loss} |\n")) is holds


@pytest.mark.parametrize(
    ("other", "low", "holds"),
    [("+0.10%", "-0.90%", True), ("+0.10%", "+1.20%", False), ("-1.50%", "+1.20%", True)],
)
def test_eight_bits_are_as_near_as_other_rows_are(other, low, holds):
    table = "| products | of bfloat16 |\n|---|---|\n| bfloat16 | +0.00% |\n"
    rows = rows_of(f"{table}| bfloat16, other rows | {other} |\n| rowwise | {low} |\n")
    assert near_bfloat16(rows) is holds


def script(code: str, limit_s: float = 60.0) -> Part:
    return Part(name="some", command=("-c", code), quick=(), limit_s=limit_s, wanted="all well")


def test_a_part_that_is_late_is_stopped_with_what_it_started(tmp_path):
    code = "import subprocess, sys, time\nprint('| a |', flush=True)\n"
    code += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    outcome = run_part(script(code, limit_s=3.0), ("-c", code), tmp_path)
    assert (outcome.code, outcome.verdict) == (None, "stopped after 3 s")
    assert outcome.table == "| a |"


def test_one_that_fails_is_told_and_the_others_stand_beside_it(tmp_path):
    outcomes = [
        run_part(script(code), ("-c", code), tmp_path)
        for code in ("raise SystemExit(3)", "print('| x |')")
    ]
    text = section(outcomes, "1 x some GPU")
    assert "| some | all well | failed (exit code 3) | 0 |" in text
    assert "| some | all well | yes | 0 |" in text
    assert replace_section(RESULTS.read_text(), "gpu", text).count(text) == 1


def test_all_parts_together_end_within_half_an_hour():
    assert sum(part.limit_s for part in PARTS) <= 1800
