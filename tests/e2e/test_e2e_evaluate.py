"""A server with the model that a run has exported earns what the run's own validation did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai_server import start_process
from real_runs import SMALL, SOURCES, Runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REWARD = """
def letters(sample):
    return sum(map(ord, sample.response)) % 97 / 97
"""


def evaluate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    return subprocess.run(
        [sys.executable, "-m", "cosmos_app", "evaluate", *arguments],
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "200"},
        timeout=240,
        check=False,
    )


def test_the_exported_model_at_a_server_earns_what_the_run_measured_of_it(
    runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    function = f"{tmp_path}/rewards.py:letters"
    letters = f'{{kind="python", name="letters", function="{function}"}}'
    run = runner.complete(
        *SMALL, "trainer.steps=2", "rollout.sampling.max_new_tokens=8",
        f'reward.rewards=[{{kind="exact"}}, {letters}]',
    )  # fmt: skip
    own = {record["step"]: record["values"]["reward"] for record in run.metrics("validation")}
    assert set(own) == {0, 2}
    process, url = start_process(run.output / "export" / "model")
    try:
        done = evaluate(str(run.output), "--url", url, "--model", "tiny", "--json")
        shown = evaluate(str(run.output), "--url", url, "--model", "tiny")
    finally:
        process.kill()
        process.communicate()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_prompts"] == 16
    assert 0.0 < found["reward"] < 1.0
    assert found["reward"] == pytest.approx(own[2], abs=1e-12)
    assert {int(version): reward for version, reward in found["measured"].items()} == own
    assert "16 of 16 prompts" in done.stderr
    assert shown.returncode == 0, shown.stderr
    assert f"{own[0]:.3f} at version 0, {own[2]:.3f} at version 2" in shown.stdout
