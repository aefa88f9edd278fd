"""What real ranks of real trainers say that they hold, against the whole model, over gloo.

Every rank compares its shards with the model before it was cut; here the layouts of all ranks are
put together and must cover every tensor of the checkpoint.
"""

import json
from pathlib import Path

import pytest
from forked_scripts import TRAINERS, finished, warm

from cosmos_weightsync import Layout, plan_transfer

_SCRIPT = Path(__file__).with_name("layout_process.py")


def describe(case: str, num_ranks: int) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    out = finished([_SCRIPT, case, num_ranks], warm(TRAINERS), 240)
    said = sorted((json.loads(line) for line in out.splitlines() if line[:1] == "{"), key=_rank)
    assert [item["rank"] for item in said] == list(range(num_ranks))
    assert [item["wrong"] for item in said] == [[]] * num_ranks
    assert all(item["checked"] for item in said)
    whole = {name: tuple(shape) for name, shape in said[0]["whole"].items()}
    return Layout.merge([Layout.from_json(item["layout"]) for item in said]), whole


def _rank(said: dict) -> int:
    return said["rank"]


def check_whole(layout: Layout, whole: dict[str, tuple[int, ...]]) -> None:
    """Every tensor of the checkpoint is there in its shape, and no element is missing."""
    assert {name: layout.shape_of(name) for name in layout.tensors} == whole
    plan_transfer(layout, Layout.from_ranks([layout.full_specs()]))


def test_hsdp_with_uneven_rows():
    layout, whole = describe("hsdp", 4)
    check_whole(layout, whole)
    rows = [[spec.box.shape[0] for spec in layout.specs_of(rank)] for rank in range(4)]
    assert rows == [[4, 4, 2, 2, 2, 2], [3, 3, 1, 1, 1, 1]] * 2


def test_fsdp_over_tensor_parallel_rows():
    layout, whole = describe("fsdp_tp", 4)
    check_whole(layout, whole)
    starts = [layout.specs_of(rank)[0].box.start[0] for rank in range(4)]
    assert starts == [0, 4, 2, 6]  # TP is the outer cut of the rows, FSDP the inner.
    rows = [{spec.name: spec.box.shape[0] for spec in layout.specs_of(rank)} for rank in range(4)]
    assert [held["2.weight"] for held in rows] == [3, 3, 2, 2]
    assert ["3.weight" in held for held in rows] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_torchtitan_stages_are_described_in_checkpoint_names(family):
    pytest.importorskip("torchtitan")
    layout, whole = describe(f"titan:{family}", 4)
    check_whole(layout, whole)
    first = {spec.name for rank in (0, 1) for spec in layout.specs_of(rank)}
    assert "model.embed_tokens.weight" in first
    assert "model.layers.0.self_attn.k_proj.weight" in first  # Fused with q and v in memory.
    assert not any(name.startswith("model.layers.1.") for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_tensor_parallel_hugging_face_model(kind):
    pytest.importorskip("transformers")
    layout, whole = describe(f"hugging_face:{kind}", 2)
    check_whole(layout, whole)
    boxes = [{spec.name: spec.box.shape for spec in layout.specs_of(rank)} for rank in range(2)]
    query, output = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")
    assert [(rank[query], rank[output]) for rank in boxes] == [((8, 16), (16, 8))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_an_expert_parallel_hugging_face_model(kind):
    pytest.importorskip("transformers")
    layout, whole = describe(f"hugging_face:{kind}:experts", 2)
    check_whole(layout, whole)
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    held = [
        (spec.box.start[0], spec.box.stop[0], spec.box.shape[1:] == whole[experts][1:])
        for rank in range(2)
        for spec in layout.specs_of(rank)
        if spec.name == experts
    ]
    assert held == [(0, 2, True), (2, 4, True)]
