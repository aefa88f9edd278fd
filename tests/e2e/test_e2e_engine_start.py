"""Engines that cannot start: the run ends at once and says which key to change."""

import pytest
from real_runs import SMALL, Runner

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


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
