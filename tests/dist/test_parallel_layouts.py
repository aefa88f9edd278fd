"""Every data-parallel layout takes the step that one process takes."""

import json
from pathlib import Path

import pytest
import torch
from process_trees import run_tree

RANKS = Path(__file__).with_name("parallel_ranks.py")
# replicas, ranks in each, of which replicated (HSDP)
LAYOUTS = {
    "one": (1, 1, 1),
    "two_ranks": (1, 2, 1),
    "two_replicas": (2, 1, 1),
    "two_by_two": (2, 2, 1),
    "hsdp": (1, 4, 2),
    "three_ranks": (1, 3, 1),
}


CASES = [
    {"name": name, "model": "qwen3", "layout": layout, "checkpointing": "none"}
    for name, layout in LAYOUTS.items()
] + [
    {"name": name, "model": "llama", "layout": LAYOUTS[layout], "checkpointing": checkpointing}
    for name, layout, checkpointing in [
        ("llama_one", "one", "none"),
        ("llama_two_ranks", "two_ranks", "none"),
        ("llama_two_ranks_recomputed", "two_ranks", "full"),
    ]
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Run every scenario; importing torch is most of the time, so all in one process tree."""
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "cases.json").write_text(json.dumps(CASES))
    run_tree(RANKS, directory, "layouts", "resharding", "edges", deadline_s=270)
    return directory


@pytest.fixture(scope="module")
def results(written) -> dict:
    return {case["name"]: torch.load(written / f"{case['name']}-0.pt") for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reference"),
    [(name, "one") for name in LAYOUTS if name != "one"]
    + [("llama_two_ranks", "llama_one"), ("llama_two_ranks_recomputed", "llama_one")],
)
def test_layout_takes_the_steps_of_one_process(results, name, reference):
    for step, (mine, theirs) in enumerate(
        zip(results[name]["reports"], results[reference]["reports"], strict=True)
    ):
        assert mine["outcome"] == theirs["outcome"] == "updated"
        assert mine["weight"] == theirs["weight"]
        assert mine["metrics"] == theirs["metrics"] == {"rows": 10.0}
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6), step
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5), step
    for key, value in results[reference]["weights"].items():
        torch.testing.assert_close(results[name]["weights"][key], value, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1x1r1", "1x2r1", "1x3r1", "1x4r2"])
def test_a_checkpoint_of_two_ranks_resumes_on_any_layout(written, layout):
    expected = torch.load(written / "trained.pt")["reports"]
    for mine, theirs in zip(torch.load(written / f"resumed-{layout}.pt"), expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["lr"] == theirs["lr"]


@pytest.mark.slow
def test_export_from_two_ranks_has_every_weight(written):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    exported = load_file(written / "exported" / "model.safetensors")
    weights = torch.load(written / "trained.pt")["weights"]
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], value) for name, value in weights.items())
    model, loading = AutoModelForCausalLM.from_pretrained(
        written / "exported", output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not any(loading.values())


@pytest.mark.slow
def test_damage_seen_by_one_rank_is_an_error_on_all(written):
    errors = [json.loads((written / f"refused-{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(found) for found in errors] == [1, 1]
    assert any("__1_0.distcp has" in found[0] for found in errors)


@pytest.mark.slow
def test_ranks_with_nothing_to_do_keep_step(written):
    first, second = (json.loads((written / f"edges-{rank}.json").read_text()) for rank in (0, 1))
    assert "pass an empty batch" in first["no_filler"][0]
    assert first["no_filler"] == second["no_filler"]
    assert "shared_expert_gate.weight is (1, 8) and shared by 2" in first["one_row_for_muon"]
    assert first["no_batch_anywhere"] == first["no_weight_anywhere"] == "no_weight"
    assert first["evaluated"] == second["evaluated"]
    assert first["one_has_weight"]["outcome"] == "updated"
    # the loss of a step is taken before its update, so it is the evaluated one
    assert first["one_has_weight"]["loss"] == pytest.approx(first["evaluated"]["loss"], rel=1e-6)
    assert first["one_has_weight"]["weight"] == first["evaluated"]["weight"]
    assert first["one_has_weight"]["loss"] == second["one_has_weight"]["loss"]


@pytest.mark.slow
def test_mixed_precision_keeps_float32_parameters(written, results):
    loss, kinds = json.loads((written / "mixed.json").read_text())
    assert kinds == ["torch.float32"]
    exact = results["one"]["reports"][0]["loss"]
    # bfloat16 has 8 bits of precision
    assert loss == pytest.approx(exact, rel=2e-2)
    assert loss != exact
