"""What the benchmark tables are computed with: values checked by hand."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from curves import Point, first_at, median_and_range, samples_per_second, step_seconds
from measure import CommandFailedError, cpu_at, measure
from run import replace_section


def curve(rewards: list[float], step_s: float = 2.0) -> list[Point]:
    return [
        Point(step=i, seconds=step_s * (i + 1), cpu_s=3.0 * (i + 1), reward=reward)
        for i, reward in enumerate(rewards)
    ]


def test_target_is_reached_at_the_step_that_completes_the_mean():
    # ten steps of 0 and then ones: the trailing mean of ten is 0.5 with the fifth one
    found = first_at(curve([0.0] * 10 + [1.0] * 10), 0.5)
    assert found is not None
    assert (found.step, found.seconds, found.cpu_s) == (14, 30.0, 45.0)


def test_target_that_is_never_reached_is_none():
    assert first_at(curve([0.4] * 30), 0.5) is None


def test_one_lucky_step_does_not_reach_a_target():
    assert first_at(curve([0.0] * 15 + [1.0] + [0.0] * 15), 0.5) is None


def test_rate_leaves_the_first_ten_steps_out():
    slow_start = [Point(step=i, seconds=100.0 + i, cpu_s=0.0, reward=0.0) for i in range(21)]
    assert samples_per_second(slow_start, 512) == pytest.approx(512.0)


def test_step_time_is_the_median_gap():
    points = [
        Point(step=i, seconds=at, cpu_s=0.0, reward=0.0) for i, at in enumerate([1, 2, 4, 5, 15])
    ]
    assert step_seconds(points) == 1.5  # gaps 1, 2, 1, 10


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, 0.0),
        (1.0, 2.0),
        (1.5, 3.0),  # between samples
        (9.0, 4.0),  # after the last one
    ],
)
def test_cpu_seconds_are_linear_between_samples(seconds: float, expected: float):
    assert cpu_at([(0.0, 0.0), (1.0, 2.0), (2.0, 4.0)], seconds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "text"),
    [([], "-"), ([2.0], "2.0"), ([3.0, 1.0, 2.0], "2.0 (1.0-3.0)")],
)
def test_median_comes_with_its_range(values: list[float], text: str):
    assert median_and_range(values) == text


def test_section_is_replaced_and_the_words_around_it_stay():
    document = "a\n<!-- begin rl -->\nold\n<!-- end rl -->\nb"
    assert replace_section(document, "rl", "new") == (
        "a\n<!-- begin rl -->\nnew\n<!-- end rl -->\nb"
    )
    with pytest.raises(ValueError, match="begin other"):
        replace_section(document, "other", "new")


def test_tree_is_accounted_with_its_children(tmp_path: Path):
    burn = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    (tmp_path / "burn.py").write_text(burn + "\ntime.sleep(1.5)")
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'burn.py')!r}])"
    )
    usage = measure(
        [sys.executable, "-c", parent],
        environment={},
        log=tmp_path / "log.txt",
        deadline_s=60,
    )
    assert usage.num_processes == 2
    assert usage.cpu_s >= 0.6
    assert usage.peak_pss_mib <= usage.peak_rss_mib


def test_failed_command_names_its_log(tmp_path: Path):
    with pytest.raises(CommandFailedError, match=r"exit code 3.*log\.txt"):
        measure(
            [sys.executable, "-c", "raise SystemExit(3)"],
            environment={},
            log=tmp_path / "log.txt",
            deadline_s=60,
        )
