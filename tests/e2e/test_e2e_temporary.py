"""What runs leave in the temporary directory of a machine."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from real_runs import SMALL, Runner

pytest.importorskip("vllm")


@pytest.mark.slow
def test_a_stopped_run_of_which_an_engine_was_killed_leaves_nothing_but_what_was_compiled(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed vLLM leaves sockets, and files by which its processes found one another."""
    with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as machines:
        monkeypatch.setenv("TMPDIR", machines)
        run = runner.start(*SMALL, "rollout.engine.kind=vllm", "trainer.steps=100")
        run.wait_for(lambda: run.steps_done() >= 1)
        (own,) = Path(machines).glob("cosmos-run-*")
        killed = run.child("rollout-0")
        assert any(path.is_socket() for path in own.rglob("*"))
        os.kill(killed, signal.SIGKILL)
        run.wait_for(lambda: run.children("rollout-0") not in ([], [killed]))
        run.process.send_signal(signal.SIGINT)
        run.finish()
        assert "signal 9 (SIGKILL)" in run.text
        left = [path.name for path in Path(machines).iterdir()]
        assert [name for name in left if not name.startswith("torchinductor_")] == []
