"""Supervised runs of the real program: learning, resuming in another layout, losing a replica."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_runs import ROOT, Run, Runner
from safetensors.torch import load_file

from cosmos_core.simulation import Span, StepTaken, read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECIPE = ROOT / "configs" / "sft.toml"
ROWS = ROOT / "configs" / "data" / "sums.jsonl"
STEPS = 30
SETTINGS = (
    f"trainer.steps={STEPS}",
    "trainer.validate_every=10",
    "trainer.checkpoint_every=10",
    "learner.optimizer.schedule.num_steps=100",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads of a tiny model on two busy cores wait for each other most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run from start to end in one process, on Parquet."""
    folder = tmp_path_factory.mktemp("sft")
    return Runner(folder, forks=True).complete(
        *SETTINGS, f"data.path={parquet(folder)}", recipe=RECIPE
    )


def parquet(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.output / "export" / "model" / "model.safetensors")


def difference(one: Run, other: Run) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_a_supervised_run_writes_when_it_trained_evaluated_and_saved(whole: Run) -> None:
    """Thirty steps, evaluated and saved after every ten."""
    (path,) = (whole.output / "spans").iterdir()
    log = read_log([path])
    spans = [record for record in log if isinstance(record, Span)]
    assert {span.activity for span in spans} == {
        *("wait_data", "fwd_bwd", "optim", "eval", "checkpoint"),
    }
    assert sum(span.activity == "eval" for span in spans) == 3
    assert [record.step for record in log if isinstance(record, StepTaken)] == list(range(STEPS))


def test_a_supervised_run_learns_and_exports(whole: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = whole.report
    losses = [report["losses"][str(step)] for step in range(STEPS)]
    assert losses[-1] < 0.8 * losses[0]
    for values in (record["values"] for record in whole.metrics("controller")):
        # all examples of a step fit into one row, as long as the next multiple of 16
        places = 16 * -(-values["tokens"] // 16)
        assert values["useful_tokens"] == values["tokens"] / places > 0.9
    validated = report["validation_losses"]
    assert list(map(int, validated)) == [9, 19, 29]
    assert validated["29"] < validated["9"]
    model = AutoModelForCausalLM.from_pretrained(report["export"])
    assert AutoTokenizer.from_pretrained(report["export"]).eos_token == "<eos>"
    assert sum(p.numel() for p in model.parameters()) > 0
    # two newest, of which one is the best
    kept = sorted(path.name for path in (whole.output / "checkpoints").iterdir())
    assert kept == ["step-00000019", "step-00000029"]


def test_a_stopped_run_resumes_on_two_ranks_with_the_same_weights(
    whole: Run, runner: Runner
) -> None:
    run = runner.start(*SETTINGS, f"data.path={ROWS}", recipe=RECIPE)
    run.wait_for(lambda: run.steps_done() >= 3)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 3, run.logs()
    assert 3 <= run.steps_done() < STEPS
    again = runner.complete(
        *SETTINGS, f"data.path={ROWS}", "policy.ranks=2", flags=["--resume"], recipe=RECIPE
    )
    assert [r["step"] for r in again.metrics("controller")] == list(range(STEPS))
    assert difference(whole, again) < 1e-3
    refused = runner.start(
        *SETTINGS, f"data.path={ROWS}", "trainer.steps=80", "trainer.batch.batch_size=16",
        flags=["--resume"], recipe=RECIPE,
    )  # fmt: skip
    assert refused.finish() == 2  # and is not asked again
    assert refused.text.count("died") == 1
    assert "was saved on another stream of examples (batch_size was 32 and is 16)" in refused.text


def test_a_run_whose_loss_is_not_finite_names_rank_and_examples_and_ends(runner: Runner) -> None:
    """After one update of a size that no weight survives, no loss is finite any more."""
    run = runner.start(
        "trainer.steps=9",
        "policy.ranks=2",
        "learner.optimizer.lr=1e38",
        f"data.path={ROWS}",
        name="wild",
        recipe=RECIPE,
    )
    assert run.finish() == 2, run.logs()
    notes = [record.get("note", "") for record in run.metrics("controller")]
    assert notes[0] == ""
    assert len(notes) == 1 + 3, "the fourth bad step in a row is the last"
    for number, note in enumerate(notes[1:], start=1):
        assert f"step {number + 1} changed nothing: {note}. Look at these samples" in run.text
        for rank in range(2):
            file = run.output / "bad_steps" / f"skipped-{number:04d}-rank-{rank}.pt"
            (batch,) = torch.load(file, weights_only=False)["batches"]
            named = re.escape(", ".join(batch.names))
            assert re.search(
                rf"rank {rank}: micro-batch 0 \({named}\) has loss (nan|inf); "
                rf"written to {re.escape(str(file))}",
                note,
            )
    assert "4 steps in a row were not finite" in run.text


def test_a_run_without_a_controller_can_be_stopped_from_elsewhere(runner: Runner) -> None:
    endless = ("trainer.steps=100000", "learner.optimizer.schedule.num_steps=100000")
    run = runner.start(*SETTINGS, *endless, f"data.path={ROWS}", recipe=RECIPE)
    run.wait_for(lambda: run.steps_done() >= 1)
    program = Path(sys.executable).with_name("cosmos-app")
    told = subprocess.run(
        [program, "status", run.output, "--json"], capture_output=True, text=True, check=True
    )
    status = json.loads(told.stdout)
    assert (status["kind"], status["num_steps"]) == ("sft", 100000)
    assert status["step"] >= 1
    assert status["values"]["loss"] > 0
    scaled = subprocess.run(
        [program, "scale", run.output, "--policies", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert scaled.returncode != 0
    assert "a run on given data has the replicas it began with" in scaled.stderr
    stopped = subprocess.run(
        [program, "stop", run.output, "--wait", "120"], capture_output=True, text=True, check=False
    )
    assert stopped.returncode == 0, stopped.stderr
    assert "go on with --resume" in stopped.stdout
    assert run.finish() == 3, run.logs()
    assert any((run.output / "checkpoints").iterdir())


def test_the_others_go_on_when_a_replica_is_killed(whole: Run, runner: Runner) -> None:
    pytest.importorskip("torchft")
    # every step validates and saves, or on a busy machine all are over before the replicas meet
    slow = ("trainer.validate_every=1", "trainer.checkpoint_every=1")
    elastic = ("policy.replicas=2", "elastic.lease_s=5")
    run = runner.start(*SETTINGS, *slow, *elastic, f"data.path={ROWS}", recipe=RECIPE)
    run.wait_for(lambda: any(r["values"]["replicas"] == 2 for r in run.metrics("controller")))
    os.kill(run.child("policy-0"), signal.SIGKILL)
    assert run.finish() == 0, run.logs()
    assert sorted({r["step"] for r in run.metrics("controller")}) == list(range(STEPS))
    assert ("policy-0", "restarted") in {(i["name"], i["outcome"]) for i in run.report["incidents"]}
    assert difference(whole, run) < 1e-3


def test_several_data_sets_have_their_shares_and_are_measured_apart(
    runner: Runner, tmp_path: Path
) -> None:
    rows = ROWS.read_text().splitlines()
    for name, some in (("many", rows[:150]), ("few", rows[150:162]), ("exam", rows[162:170])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some))
    sets = (
        "data.path=none",
        f"data.sets=[{{name='many', path='{tmp_path}/many.jsonl', share=3}},"
        f" {{name='few', path='{tmp_path}/few.jsonl', share=1}},"
        f" {{name='exam', held_out_path='{tmp_path}/exam.jsonl'}}]",
        "data.held_out=4",
    )
    steps = ("trainer.steps=6", "trainer.validate_every=2", "trainer.checkpoint_every=2")
    runner.complete(*sets, *steps[1:], "trainer.steps=3", recipe=RECIPE)
    run = runner.complete(*sets, *steps, flags=["--resume"], recipe=RECIPE)
    told = [record["values"] for record in run.metrics("controller")]
    # of 32 examples eight are of the eight that are left of twelve
    assert [values["epochs/few"] for values in told] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert told[-1]["epochs/many"] == pytest.approx(6 * 24 / 146)
    validations = run.metrics("validation")
    assert [record["step"] for record in validations] == [1, 2, 3, 5]
    for record in validations:
        values = record["values"]
        losses = {name: value for name, value in values.items() if "/" in name}
        assert losses.keys() == {"data_set/many", "data_set/few", "data_set/exam"}
        assert min(losses.values()) <= values["loss"] <= max(losses.values())
        assert values["loss"] == told[record["step"]]["validation_loss"]
    last = validations[-1]["values"]
    report = run.report
    assert {name: losses["5"] for name, losses in report["data_sets"].items()} == {
        name: last[f"data_set/{name}"] for name in ("many", "few", "exam")
    }
    assert set(report["losses"]) == set(map(str, range(6)))
    assert f"validation loss after step 6: {last['loss']:.3f} (many " in run.text
    refused = runner.start(
        *sets, *steps, "data.held_out=5", "trainer.steps=8", flags=["--resume"], recipe=RECIPE
    )
    assert refused.finish() == 2
    assert "num_examples of data set 'many' was 146 and is 145" in refused.text
