"""Engines that cannot start: the run ends and says which key to change."""

import os
import re
from pathlib import Path

import pytest
from real_runs import SMALL, Runner, assert_balanced

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def memory_mib() -> int:
    """Return what vLLM's device on a CPU has: the first node, which may not be all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    node = Path("/sys/devices/system/node/node0/meminfo")
    if node.exists():
        (kib,) = re.findall(r"MemTotal: +(\d+) kB", node.read_text())
        total = min(total, int(kib) << 10)
    return total >> 20


def test_an_engine_whose_cache_no_memory_can_hold_ends_the_run_with_the_key_to_change(
    runner: Runner,
) -> None:
    run = runner.start(
        *SMALL, "rollout.engine.kind=vllm", "rollout.engine.kv_cache_mib=1048576",
        "validation.before=false",
    )  # fmt: skip
    assert run.finish(deadline_s=280.0) == 2, run.logs()
    said = " ".join(run.text.split())
    assert "[rollout.engine] " in said
    assert "kv_cache_mib is 1048576, and the device of the engine has" in said
    assert "set kv_cache_mib lower" in said
    log = (run.output / "logs" / "rollout-0.log").read_text()
    assert log.count("error: [rollout.engine]") == 1, "it was not started again"


def contents(folder: Path) -> dict[Path, bytes]:
    """Return what a directory has, to the last byte."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_engine_without_memory_is_tried_again_then_ends_the_run_and_one_that_fits_goes_on(
    runner: Runner,
) -> None:
    """Of a run that has taken a step: what others have of the memory may be free in a moment."""
    words = (
        *SMALL, "validation.before=false", "validation.after=false", "launch.restarts=1",
        "trainer.checkpoint_every=1",
    )  # fmt: skip
    saved = runner.complete(*words, "trainer.steps=1").output / "checkpoints"
    before = contents(saved)
    assert sum(map(len, before.values())) > 10_000

    most = memory_mib() * 99 // 100
    words = (*words, "trainer.steps=2", "rollout.engine.kind=vllm")
    run = runner.start(*words, f"rollout.engine.kv_cache_mib={most}", flags=["--resume"])
    assert run.finish(deadline_s=280.0) == 1, run.logs()
    said = " ".join(run.text.split())
    assert "rollout-0 died (exit code 1) and has no restarts left" in said
    assert "nothing that was saved is lost, and --resume goes on from it" in said
    assert f"kv_cache_mib is {most}: set it lower" in said
    log = (run.output / "logs" / "rollout-0.log").read_text()
    assert log.count("error: [rollout.engine]") == 2, "it was started again once"
    assert "Traceback" not in said.partition("the end of")[0]
    assert contents(saved) == before

    again = runner.complete(*words, "rollout.engine.kv_cache_mib=32", flags=["--resume"])
    assert [record["step"] for record in again.metrics("controller")] == [0, 1]
    assert_balanced(again.report["books"])
    assert again.report["books"]["consumed"] == 2 * 8
    assert len(again.report["rewards"]) == 2
