"""By how many steps a loss curve lags another: values checked by hand."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from fp8_curves import delay

PLATEAU = [7.0] * 12 + [6.0, 5.0, 4.0, 3.0] + [3.0] * 4  # half of the fall, 5.0, after 14 steps


def test_a_curve_that_leaves_a_plateau_late_is_late_by_that_many_steps():
    assert delay(PLATEAU, PLATEAU) == "+0"
    assert delay(PLATEAU, [7.0] * 3 + PLATEAU[:-3]) == "+3"
    assert delay(PLATEAU, PLATEAU[2:] + [3.0] * 2) == "-2"


def test_a_curve_that_never_falls_is_later_than_the_steps_that_were_left():
    assert delay(PLATEAU, [7.0] * 20) == "> 6"
