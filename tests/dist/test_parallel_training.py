"""Optimizers, adapters, averages, packed rows, bad steps: ranks take the steps of one."""

import json
from pathlib import Path

import pytest
import torch
from process_trees import run_tree

RANKS = Path(__file__).with_name("parallel_training_ranks.py")
CASES = ("muon", "adamw_8bit", "ema", "lora")
ONE, TWO, FOUR = "1x1r1", "1x2r1", "1x4r1"
# Newton-Schulz runs in bfloat16, and sums of shards round elsewhere there
WEIGHTS = {"muon": 2e-3, "adamw_8bit": 2e-4}
# A hundredth of a step of Adam, which lifts the rounding of the smallest gradients to full size.
OF_A_STEP = 1e-4


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Run every case; importing torch is most of the time, so all in one process tree."""
    directory = tmp_path_factory.mktemp("training")
    run_tree(RANKS, directory, deadline_s=270)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_the_steps_of_one(written, name):
    one, two = (torch.load(written / f"{name}-{layout}.pt") for layout in (ONE, TWO))
    for mine, theirs in zip(two["reports"], one["reports"], strict=True):
        assert mine["outcome"] == "updated"
        assert mine["weight"] == theirs["weight"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert one["reports"][-1]["loss"] != one["reports"][0]["loss"]
    for mine, theirs in zip(two["validated"], one["validated"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
        assert mine[0] != pytest.approx(mine[1], rel=1e-4)  # the weights, and their averages
    tolerance = WEIGHTS.get(name, OF_A_STEP)
    for part in ("weights", "averages"):
        assert set(one[part]) == set(two[part])
        for key, value in one[part].items():
            torch.testing.assert_close(
                two[part][key], value, rtol=0, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.slow
def test_an_adapter_trained_on_two_ranks_is_written_whole(written):
    from safetensors.torch import load_file

    one, two = (
        load_file(written / f"adapter-{layout}" / "adapter_model.safetensors")
        for layout in (ONE, TWO)
    )
    assert set(one) == set(two)
    assert len(one) == 2 * 7 * 2
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=OF_A_STEP)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TWO, FOUR])
def test_an_adapter_of_split_layers_takes_the_steps_of_one_rank(written, layout):
    from safetensors.torch import load_file

    one = torch.load(written / f"lora-tp-{ONE}.pt")["reports"]
    split = torch.load(written / f"lora-tp-{layout}.pt")["reports"]
    for mine, theirs in zip(split, one, strict=True):
        assert mine["weight"] == theirs["weight"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    whole, joined = (
        load_file(written / f"adapter-{name}" / "adapter_model.safetensors")
        for name in (f"tp-{ONE}", f"tp-{layout}")
    )
    assert set(whole) == set(joined)
    for name, value in whole.items():
        torch.testing.assert_close(joined[name], value, rtol=0, atol=OF_A_STEP)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed-1x1r1", "packed-1x2r1", "packed-1x4r1", "padded-1x2r1"])
def test_packed_rows_on_any_ranks_take_the_steps_of_padded_ones(written, name):
    expected = torch.load(written / f"rows-padded-{ONE}.pt")["reports"]
    found = torch.load(written / f"rows-{name}.pt")["reports"]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["weight"] == theirs["weight"] == 77 - 7  # the first token of each is given
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "who"),
    [
        ("fsdp", "rank 1: micro-batch 1"),
        ("replicas", "rank 1 of policy-1: micro-batch 0"),  # of two ranks each
        ("tp", "rank 0: micro-batch 3"),  # the first of both, which have the same batches
        ("pp", "rank 0: micro-batch 3"),
    ],
)
def test_a_step_that_one_rank_makes_not_finite_is_skipped_by_all_and_told_alike(
    written, layout, who
):
    files = sorted(written.glob(f"bad-{layout}-?-?.json"))
    assert len(files) == (4 if layout == "replicas" else 2)
    seen = [json.loads(file.read_text()) for file in files]
    assert all(lines == seen[0] for lines in seen)
    assert [line["outcome"] for line in seen[0]] == [
        "updated", "non_finite", "updated", "non_finite", "ended",
    ]  # fmt: skip
    assert [line["unchanged"] for line in seen[0]] == [False, True, False, True, True]
    assert [line["skipped"] for line in seen[0]] == [0, 1, 1, 2, 3]
    dumps = sorted((written / f"bad-{layout}").iterdir())
    bad = [line["problem"] for line in seen[0] if line["problem"]]
    said = [(1, "has loss nan"), (3, "has gradients that are not finite: "), (4, "has loss nan")]
    for (step, what), problem, dump in zip(said, bad, dumps, strict=True):
        assert f"{who} (step {step} batch 3) {what}" in problem
        assert f"; written to {dump}" in problem
        assert problem.count("micro-batch") == 1
        (batch,) = torch.load(dump, weights_only=False)["batches"]
        assert batch.names == (f"step {step} batch 3",)
    assert bad[-1].startswith("2 steps in a row were not finite (now: loss sum nan")
