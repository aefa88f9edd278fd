"""Rollouts in processes of their own give the run that one process has, whoever dies, and end."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from forked_runs import preloader
from process_trees import run_ranks
from processes import parent_of, title_of

pytest.importorskip("diffusers")
pytest.importorskip("cosmos_weightsync")

from cosmos_app.fork_orders import PRELOADER
from cosmos_app.wfm.disaggregated.trainer import ReplicaLostError
from cosmos_app.wfm.running import train
from cosmos_core.config import config_to_json
from cosmos_parallel import AdamWConfig, LearnerConfig, ParallelConfig, build_mesh
from cosmos_wfm import (
    ComputeConfig,
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
DEADLINE_S = 900.0
RANK = """
import sys
from pathlib import Path
import torch
from cosmos_app.wfm.running import train
from cosmos_core.config import config_from_json
from cosmos_parallel import build_mesh, init_distributed, shutdown_distributed
from cosmos_wfm import DiffusionRlConfig

torch.set_num_threads(1)
rank, num_ranks, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
process = init_distributed(rank, num_ranks, init_method=f"file://{root}/store")
for name in sys.argv[4:]:
    recipe = config_from_json(DiffusionRlConfig, (root / f"{name}.json").read_text())
    train(recipe, build_mesh(recipe.parallel, process))
shutdown_distributed()
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("disaggregated")
    tiny_sd3_pipeline(num_layers=1).save_pretrained(root / "model")
    (root / "prompts.txt").write_text("a red square\na blue square\n")
    return DiffusionRlConfig(
        model=str(root / "model"),
        prompts=str(root / "prompts.txt"),
        output=str(root / "own"),
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


@pytest.fixture(scope="module")
def own(recipe):
    """The figures of the run in one process."""
    return figures(recipe)


def figures(recipe):
    """Run a recipe; return its figures."""
    train(recipe, build_mesh(ParallelConfig()))
    return written(recipe)


def rows_of(recipe):
    lines = (Path(recipe.output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def written(recipe):
    """Return the figures of a run's steps, but for time, memory and passes, which ranks share."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.endswith(("_s", "_per_rank", "_mib", "num_passes"))
        }
        for row in rows_of(recipe)
    ]


class Killer(threading.Thread):
    """Kills the first of a run's replicas whose log says something, or stops it."""

    def __init__(self, recipe, at, by=signal.SIGKILL):
        super().__init__()
        self._logs = Path(recipe.output) / "disaggregated"
        self._at = at
        self._by = by
        self._over = threading.Event()
        self.killed = 0
        self.forker = ""

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()

    def run(self):
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end and not self._over.is_set() and not self.killed:
            for log in self._logs.glob("*.log"):
                if not self.killed and self._at in log.read_text():
                    self._kill(log.resolve())
            time.sleep(0.01)

    def _kill(self, log):
        """Send the signal to the process that writes to this log."""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command, output = file.read_bytes(), (file.parent / "fd" / "1").resolve()
            except OSError:
                continue  # it has ended
            if b"rollout" in command and output == log:
                self.killed = int(file.parent.name)
                self.forker = title_of(parent_of(self.killed))
                os.kill(self.killed, self._by)


@pytest.mark.slow
def test_a_run_with_replicas_one_of_which_is_killed_is_the_run_without_any(
    recipe, own, tmp_path, capfd
):
    # What travels are adapters only: those of the policy that lags behind the trained one.
    # It is killed in its first step; the run is long enough for that.
    steps = NUM_STEPS + 5
    apart = DisaggregatedConfig(replicas=2, deadline_s=DEADLINE_S)
    recipe = replace(recipe, output=str(tmp_path / "apart"), disaggregated=apart, num_steps=steps)
    with Killer(recipe, "micro-batch") as killer:
        theirs = figures(recipe)

    assert killer.killed
    assert "imports what replicas share" in killer.forker
    assert (len(own), len(theirs)) == (NUM_STEPS, steps)
    assert theirs[:NUM_STEPS] == own
    for row in rows_of(recipe):
        num = recipe.groups_per_step * recipe.samples_per_group
        assert row["generated_per_s_per_rank"] == pytest.approx(num / row["sample_s"])
        assert row["wait_s"] + row["train_s"] < row["step_s"]
        assert row["replica_peak_memory_mib"] > 50
    assert (
        f"(process {killer.killed}) ended: signal 9 (SIGKILL); restarted" in capfd.readouterr().err
    )
    logs = sorted((tmp_path / "apart" / "disaggregated").glob("*"))
    assert [log.name for log in logs] == ["replica0.log", "replica1.log"]
    drawn = "".join(log.read_text() for log in logs).count("drawn")
    assert drawn >= steps * 3  # and those that were drawn again


@pytest.mark.slow
def test_a_run_whose_only_replica_is_stopped_starts_it_again(recipe, own, tmp_path, capfd):
    apart = DisaggregatedConfig(replicas=1, restarts=100, lease_s=3.0, deadline_s=DEADLINE_S)
    steps = NUM_STEPS + 5  # it is stopped in its first; the run is long enough for that
    recipe = replace(recipe, output=str(tmp_path / "apart"), disaggregated=apart, num_steps=steps)
    with Killer(recipe, "micro-batch", signal.SIGSTOP) as stopper:
        theirs = figures(recipe)

    assert stopper.killed
    assert theirs[:NUM_STEPS] == own
    said = capfd.readouterr().err
    assert f"(process {stopper.killed}) said nothing for 3 s; it is killed" in said
    assert f"(process {stopper.killed}) ended: signal 9 (SIGKILL); restarted" in said


@pytest.fixture(scope="module")
def of_two_ranks(recipe, tmp_path_factory):
    """The recipes that two processes have run: with two replicas, and sharing every sample."""
    root = tmp_path_factory.mktemp("ranks")
    recipes = {
        "two": replace(
            recipe, disaggregated=DisaggregatedConfig(replicas=2, deadline_s=DEADLINE_S)
        ),
        "context": replace(recipe, parallel=ParallelConfig(cp=2)),
        "shared": replace(
            recipe,
            parallel=ParallelConfig(cp=2),
            disaggregated=DisaggregatedConfig(replicas=1, deadline_s=DEADLINE_S),
        ),
    }
    return run_all(recipes, root, num_ranks=2)


def run_all(recipes, root, *, num_ranks):
    """Run recipes one after the other in ranks of their own; return them with their outputs."""
    recipes = {name: replace(each, output=str(root / name)) for name, each in recipes.items()}
    for name, each in recipes.items():
        (root / f"{name}.json").write_text(config_to_json(each))
    arguments = [(rank, num_ranks, root, *recipes) for rank in range(num_ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PRELOADER, preloader())
        run_ranks(RANK, root, arguments, DEADLINE_S)
    return recipes


@pytest.mark.slow
def test_replicas_compute_in_the_type_of_the_run_so_that_ratios_begin_at_one(recipe, tmp_path):
    recipe = replace(
        recipe,
        compute=ComputeConfig(dtype="bfloat16"),
        algorithm=FlowGrpoConfig(clip=1e-4, kl=0.1),
        num_steps=1,
    )
    apart = DisaggregatedConfig(replicas=1, deadline_s=DEADLINE_S)
    recipes = {"own": recipe, "apart": replace(recipe, disaggregated=apart)}
    recipes = run_all(recipes, tmp_path, num_ranks=1)

    assert written(recipes["apart"]) == written(recipes["own"])
    assert [row["ratio"] for row in written(recipes["apart"])] == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "context", "shared"])
def test_two_ranks_have_the_figures_of_one_process(own, of_two_ranks, name):
    theirs = written(of_two_ranks[name])

    assert len(theirs) == NUM_STEPS
    for mine, row in zip(own, theirs, strict=True):
        assert row == pytest.approx(mine, abs=1e-5)


@pytest.mark.slow
def test_a_replica_that_may_not_be_started_again_ends_the_run_which_says_so(recipe, tmp_path):
    # All weights travel, and noisy steps come back; the replica may be a version behind.
    changes = {"algorithm": FlowGrpoConfig(clip=0.1), "tuning": FullTuning()}
    own = figures(replace(recipe, output=str(tmp_path / "own"), num_steps=1, **changes))
    apart = DisaggregatedConfig(replicas=1, max_lag=1, restarts=0, deadline_s=DEADLINE_S)
    recipe = replace(
        recipe, output=str(tmp_path / "a"), disaggregated=apart, num_steps=10_000, **changes
    )

    lost = pytest.raises(ReplicaLostError, match=r"is missing: replica0 died \(signal 9")
    # step 2 is ordered once the first is over
    with Killer(recipe, "step 2") as killer, lost:
        figures(recipe)
    assert killer.killed
    assert {name: written(recipe)[0][name] for name in own[0]} == own[0]
