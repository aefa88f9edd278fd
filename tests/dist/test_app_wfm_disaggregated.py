"""Rollouts in processes of their own give the run that one process has, and end with it."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("cosmos_weightsync")

from cosmos_app.wfm.disaggregated.trainer import ReplicaLostError
from cosmos_app.wfm.running import train
from cosmos_parallel import AdamWConfig, LearnerConfig, ParallelConfig, build_mesh
from cosmos_wfm import (
    DiffusionRlConfig,
    DisaggregatedConfig,
    FlowGrpoConfig,
    FullTuning,
    LoraTuning,
    NftConfig,
    OldPolicyDecay,
    SamplerConfig,
    tiny_sd3_pipeline,
)

NUM_STEPS = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("disaggregated")
    tiny_sd3_pipeline(num_layers=1).save_pretrained(root / "model")
    (root / "prompts.txt").write_text("a red square\na blue square\n")
    return DiffusionRlConfig(
        model=str(root / "model"),
        prompts=str(root / "prompts.txt"),
        output="",
        num_steps=NUM_STEPS,
        rewards={"prompt_colour": 1.0},
        groups_per_step=2,
        samples_per_group=3,
        micro_batch_size=2,
        sampler=SamplerConfig(num_steps=3, height=16, width=16),
        algorithm=NftConfig(kl=0.1, decay=OldPolicyDecay(rate=0.2, most=0.5)),
        tuning=LoraTuning(rank=2, alpha=4),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=1e-2)),
    )


def figures(recipe, output, **changes):
    """Run a recipe; return the figures of its steps that are no times."""
    recipe = replace(recipe, output=str(output), **changes)
    train(recipe, build_mesh(ParallelConfig()))
    rows = [json.loads(row) for row in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in row.items() if "second" not in name} for row in rows]


@pytest.mark.slow
def test_replicas_draw_what_the_run_itself_would(recipe, tmp_path):
    # What travels are adapters only: those of the policy that lags behind the trained one.
    own = figures(recipe, tmp_path / "own")
    apart = DisaggregatedConfig(replicas=2, deadline_s=120.0)
    theirs = figures(recipe, tmp_path / "apart", disaggregated=apart)

    assert len(own) == NUM_STEPS
    assert theirs == own
    logs = sorted((tmp_path / "apart" / "disaggregated").glob("*"))
    assert [log.name for log in logs] == ["replica0.log", "replica1.log"]
    for log in logs:
        assert log.read_text().count("drawn") == NUM_STEPS


@pytest.mark.slow
def test_a_replica_that_is_killed_ends_the_run_which_says_so(recipe, tmp_path):
    # All weights travel, and noisy steps come back; the replica may be a version behind.
    changes = {"algorithm": FlowGrpoConfig(clip=0.1), "tuning": FullTuning()}
    own = figures(recipe, tmp_path / "own", num_steps=1, **changes)
    apart = DisaggregatedConfig(replicas=1, max_lag=1, deadline_s=120.0)
    log = tmp_path / "apart" / "disaggregated" / "replica0.log"

    def kill():
        end = time.monotonic() + 100.0
        while time.monotonic() < end and not (log.exists() and "step 1 drawn" in log.read_text()):
            time.sleep(0.01)
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            command = status.read_bytes().split(b"\0") if status.exists() else []
            if b"rollout" in command and str(tmp_path / "apart").encode() in command:
                os.kill(int(status.parent.name), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(ReplicaLostError, match="a rollout replica ended before step"):
            figures(recipe, tmp_path / "apart", disaggregated=apart, num_steps=10_000, **changes)
    finally:
        killer.join()
    first = json.loads((tmp_path / "apart" / "metrics.jsonl").read_text().splitlines()[0])
    assert {name: first[name] for name in own[0]} == own[0]
