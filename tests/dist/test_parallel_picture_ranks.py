"""A model that sees takes the same steps on one rank and on several, pictures, videos or none.

CI runs a choice of layouts with pictures; ``--parallel-axes all`` runs all.
"""

import json
from pathlib import Path

import pytest
import torch
from capabilities import needs
from process_trees import run_tree
from safetensors.torch import load_file
from seeing import (
    can_cut_pictures,
    reader_of,
    seeing_environment,
    write_pictures,
    write_seeing_model,
    write_videos,
)
from tiny_models import write_random
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from cosmos_parallel import (
    FreezeError,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    build_mesh,
    export_lora,
    load_causal_lm,
)

RANKS = Path(__file__).with_name("picture_ranks.py")
ROWS = (
    {"prompt": "hue?", "response": "blue", "images": ["p/blue-56x28.png", "p/red-28x28.png"]},
    {"prompt": "size?", "response": "big", "images": ["p/green-56x56.png"]},
    {"prompt": "and one without?", "response": "none"},
    {"prompt": "text", "response": "more of it"},
)
MOVING = (
    {"prompt": "what?", "response": "noise", "videos": "v/plain.mp4"},
    {"prompt": "both?", "response": "yes", "videos": "v/odd.mp4", "images": "p/red-28x28.png"},
)
RUNS = (
    *(("fsdp", case) for case in ("plain", "packed", "recomputed", "adapted", "language")),
    ("tp", "plain"),
    ("tp", "adapted"),
    *(("cp", case) for case in ("plain", "packed", "recomputed", "adapted")),
    ("tp-cp", "plain"),
    ("hsdp", "plain"),
    ("fsdp-tp", "plain"),
    ("fsdp-cp", "packed"),
    ("ddp", "plain"),
    ("replicas", "plain"),
    *(("pp", case) for case in ("plain", "packed", "recomputed", "adapted", "language")),
    *(("fsdp-pp", case) for case in ("plain", "adapted")),
    ("tp-pp", "packed"),
    *(("cp-pp", case) for case in ("plain", "packed", "recomputed")),
)
FURTHER = (
    *(("tp", case) for case in ("packed", "recomputed")),
    *(("tp-cp", case) for case in ("packed", "adapted")),
    *(("hsdp", case) for case in ("packed", "recomputed", "adapted", "language")),
    *(("fsdp-tp", case) for case in ("packed", "recomputed", "adapted")),
    *(("fsdp-cp", case) for case in ("plain", "recomputed", "adapted")),
)


def pytest_generate_tests(metafunc):
    if "shown" in metafunc.fixturenames:
        option = metafunc.config.getoption("--parallel-axes")
        runs = RUNS + FURTHER if option == "all" else RUNS
        metafunc.parametrize("shown", runs, ids=["-".join(each) for each in runs])


@pytest.fixture(scope="module")
def written(tmp_path_factory, request) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    write_seeing_model(directory / "model")
    config = AutoConfig.from_pretrained(directory / "model")
    config.text_config.num_key_value_heads = 2  # one for each of two ranks
    write_random(config, directory / "model")
    write_pictures(directory / "p")
    for name, rows in (("pictures", ROWS), ("videos", ROWS + MOVING)):
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    option = request.config.getoption("--parallel-axes")
    run_tree(RANKS, directory, "pictures", option, deadline_s=500)
    return directory


@pytest.fixture(scope="module")
def moving(written) -> Path:
    write_videos(written / "v")
    run_tree(RANKS, written, "videos", deadline_s=500, environment=seeing_environment())
    return written


@pytest.mark.slow
def test_ranks_with_and_without_pictures_take_the_steps_of_one(written, shown):
    check_steps_of_one(written, *shown)


@pytest.mark.slow
@needs("torchvision", can_cut_pictures())
@pytest.mark.parametrize(
    ("run", "case"),
    [
        *(("fsdp", case) for case in ("videos", "videos-packed", "videos-adapted")),
        *(("cp", case) for case in ("videos", "videos-packed", "videos-adapted")),
        ("tp", "videos"),
        ("pp", "videos"),
        ("pp", "videos-packed"),
    ],
)
def test_ranks_with_videos_pictures_text_or_nothing_take_the_steps_of_one(moving, run, case):
    check_steps_of_one(moving, run, case)


def check_steps_of_one(written: Path, run: str, case: str) -> None:
    one, many = (torch.load(written / f"{each}-{case}.pt") for each in ("one", run))
    for mine, theirs in zip(many["reports"], one["reports"], strict=True):
        assert mine["outcome"] == theirs["outcome"] == "updated"
        assert mine["weight"] == theirs["weight"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert set(many["weights"]) == set(one["weights"])
    for name, value in one["weights"].items():
        torch.testing.assert_close(
            many["weights"][name], value, rtol=0, atol=1e-5, msg=lambda m, k=name: f"{k}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", ["packed", "recomputed"])
def test_layout_and_recomputation_change_no_step(written, case):
    plain, other = (torch.load(written / f"one-{each}.pt") for each in ("plain", case))
    for mine, theirs in zip(other["reports"], plain["reports"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "directory"), [("fsdp", "exported"), ("pp", "exported-pp")])
def test_what_is_frozen_stays_and_the_rest_moves(written, run, directory):
    found = torch.load(written / f"{run}-language.pt")
    before = load_file(written / "model" / "model.safetensors")
    exported = load_file(written / directory / "model.safetensors")
    assert exported.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(exported[name], value) is name.startswith("visual."), name
    assert not [name for name in found["trained"] if ".visual." in name]


@pytest.mark.slow
def test_an_export_reads_pictures_as_the_original_does(written):
    exported = written / "exported"
    assert AutoImageProcessor.from_pretrained(exported).merge_size == 2
    assert AutoTokenizer.from_pretrained(exported).chat_template
    reader = reader_of(exported)
    picture = str(written / "p" / "green-56x56.png")
    token_ids = torch.tensor([reader.expand([20, reader.mark_id, 21], [picture])])
    inputs = reader.inputs(token_ids, [[picture]])
    model = AutoModelForImageTextToText.from_pretrained(exported)
    assert model(input_ids=token_ids, **inputs).logits.isfinite().all()


def test_adapters_are_of_the_language_model_alone(tmp_path):
    write_seeing_model(tmp_path)
    mesh = build_mesh(ParallelConfig())

    def adapted(config: LoraConfig, *freeze: str) -> set[str]:
        model = load_causal_lm(tmp_path, mesh, ModelConfig(lora=config, freeze=freeze))
        names = (name for name, value in model.named_parameters() if value.requires_grad)
        return {name.split(".lora_")[0] for name in names}

    every = adapted(LoraConfig(rank=2))
    assert len(every) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in every)
    late = adapted(LoraConfig(rank=2), "model.language_model.layers.0.*")
    assert late == {name for name in every if ".layers.1." in name}
    seeing = adapted(LoraConfig(rank=2, targets=("qkv", "q_proj")))
    assert {name for name in seeing if ".visual." in name} == {
        f"model.visual.blocks.{index}.attn.qkv" for index in (0, 1)
    }


def test_a_pattern_that_freezes_nothing_is_refused_with_names_near_it(tmp_path):
    write_seeing_model(tmp_path)
    with pytest.raises(FreezeError, match=r"'visual\.\*'.*there is model\.visual\."):
        load_causal_lm(tmp_path, build_mesh(ParallelConfig()), ModelConfig(freeze=("visual.*",)))


def test_an_adapter_of_a_model_that_sees_is_loaded_by_peft(tmp_path):
    peft = pytest.importorskip("peft")
    write_seeing_model(tmp_path / "model")
    mesh = build_mesh(ParallelConfig())
    config = ModelConfig(lora=LoraConfig(rank=2))
    mine = load_causal_lm(tmp_path / "model", mesh, config)
    with torch.no_grad():
        for name, value in mine.named_parameters():
            if ".lora_B." in name:
                value.normal_(generator=torch.Generator().manual_seed(0))
    export_lora(mine, tmp_path / "adapter", mesh, base=tmp_path / "model")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    token_ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        expected = theirs(input_ids=token_ids).logits
        logits = mine(input_ids=token_ids).logits
    assert not any(".visual." in name and ".lora_" in name for name in theirs.state_dict())
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
