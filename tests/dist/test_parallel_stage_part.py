"""Models of transformers cut into stages compute what whole ones do, and others are refused."""

import copy
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from seeing import FAMILIES as TURNING
from seeing import reader_of, write_pictures, write_seeing_family
from seeing_in_order import FAMILIES as COUNTING
from seeing_in_order import MARK, config_of, pictures_of, rows_of
from tiny_models import tiny_config, write_random

from cosmos_parallel import MeshError, ParallelConfig, ProcessContext, supported_models
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.pipeline import Call, divide_layers
from cosmos_parallel.rotary_axes import RotaryAxes
from cosmos_parallel.stage_part import StagePart
from cosmos_parallel.staged import check_trained, padded_call, told_beside

KINDS = """
afmoe apertus arcee aria_text axk1 axk2 cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3
deepseek_v32 doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text
glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_oss granite granite_swa helium hy_v3 hyperclovax
inkling_text jais2 kimi_linear laguna llama mellum mimo_v2_flash minicpm3 minimax
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral olmo olmo2 olmo3 olmo_hybrid phi
phi3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3
solar_open starcoder2 vaultgemma youtu
"""
CUT = KINDS.split()
LAYERS = 4
# what a config is made small with, where the usual sizes are none that its code takes
OWN = {
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "afmoe": {"mup_enabled": True},
    "granite": {"embedding_multiplier": 12.0},
    "granite_swa": {"embedding_multiplier": 12.0},
    "hyperclovax": {"embedding_multiplier": 10.0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
}


def deep_config(kind: str) -> transformers.PretrainedConfig:
    """Return a config of four layers, as different as the kind's are."""
    config = tiny_config(kind)
    small = config.to_dict() | OWN.get(kind, {}) | {"num_hidden_layers": LAYERS}
    for name, value in small.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            small[name] = value * (LAYERS // len(value))
    return type(config)(**small)


def logits_of_stages(
    model: transformers.PreTrainedModel, call: Call, cuts: tuple[int, ...]
) -> torch.Tensor:
    """Return what stages, one after the other, make of a call."""
    num_layers = model.config.get_text_config().num_hidden_layers
    ends = (0, *cuts, num_layers)
    hidden = call.tokens
    for start, stop in pairwise(ends):
        stage = StagePart(copy.deepcopy(model), range(start, stop), num_layers)
        stage.check_entry(torch.empty(0))
        stage.calls = (call,)
        hidden = stage(hidden, torch.tensor([0]))
    return stage.outputs(call, hidden, {}).logits


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * largest)


def model_of(config: transformers.PretrainedConfig, directory: Path) -> Any:
    write_random(config, directory)
    seeing = hasattr(config, "vision_config")
    kind = "AutoModelForImageTextToText" if seeing else "AutoModelForCausalLM"
    return getattr(transformers, kind).from_pretrained(directory).eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUT)
@torch.no_grad()
def test_stages_of_every_decoder_make_the_logits_of_the_whole(kind, tmp_path):
    model = model_of(deep_config(kind), tmp_path)
    tokens = torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=tokens, use_cache=False).logits
    last = model.config.get_text_config().num_hidden_layers - 1
    assert_alike(logits_of_stages(model, Call(tokens, None), (1, last)), expected)


def test_every_decoder_that_is_said_to_be_cut_is_looked_at():
    by_transformers = {each.model_type for each in supported_models() if "pp" in each.axes}
    seen = {*TURNING, *COUNTING} - {"gemma3"}
    sights = {"kimi_k25", "muse_glimmer", "qwen3_5", "qwen3_5_moe"}  # torchtitan's, of words alone
    assert by_transformers - sights <= {*CUT, *seen}


@pytest.mark.slow
@pytest.mark.parametrize("family", [each for each in COUNTING if each != "gemma3"])
@torch.no_grad()
def test_stages_of_models_that_count_pictures_as_text_make_the_logits_of_the_whole(
    family, tmp_path
):
    model = model_of(config_of(family), tmp_path)
    pictures = pictures_of(family)
    seen = model.base_model.get_image_features(**pictures, return_dict=True).pooler_output
    parts = seen if isinstance(seen, list | tuple) else [seen]
    rows = rows_of(sum(part.flatten(0, -2).shape[0] for part in parts) // 3)
    assert bool((rows == MARK).any())
    expected = model(input_ids=rows, **pictures, use_cache=False).logits
    assert_alike(logits_of_stages(model, Call(rows, None, pictures), (1,)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TURNING)
@torch.no_grad()
def test_stages_of_models_that_turn_by_height_and_width_make_the_logits_of_the_whole(
    kind, tmp_path
):
    write_seeing_family(tmp_path / kind, kind)
    write_pictures(tmp_path)
    reader = reader_of(tmp_path / kind)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / kind).eval()
    picture = str(tmp_path / "red-56x28.png")
    tokens = torch.tensor([[*reader.expand([20, reader.mark_id, 21, 22], [picture]), 23]])
    inputs = reader.inputs(tokens, [[picture]])
    expected = model(input_ids=tokens, **inputs, use_cache=False).logits
    positions = RotaryAxes(model.config).positions(
        inputs["mm_token_type_ids"], pictures=[inputs["image_grid_thw"]]
    )
    assert_alike(logits_of_stages(model, Call(tokens, positions, inputs), (1,)), expected)


def test_padding_goes_on_with_the_last_sample_and_adds_rows_of_one():
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    told: Mapping[str, Any] = {"mm_token_type_ids": torch.ones(1, 5), "pixel_values": torch.ones(7)}
    call = padded_call(Call(torch.ones(1, 5), positions, told), rows=2, columns=7)
    assert call.positions is not None
    assert call.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]
    assert call.tokens.tolist() == [[1] * 5 + [0] * 2, [0] * 7]
    assert call.others["mm_token_type_ids"].tolist() == call.tokens.tolist()
    assert call.others["pixel_values"] is told["pixel_values"]
    axes = torch.arange(4)[:, None, None] + positions
    assert padded_call(Call(torch.ones(1, 5), axes), 2, 7).positions.shape == (4, 2, 7)


def test_layers_are_divided_as_evenly_as_can_be():
    assert divide_layers(5, 2) == [range(3), range(3, 5)]


class Louder(transformers.GraniteModel):
    """A decoder that doubles what comes out of its layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.last_hidden_state = 2 * out.last_hidden_state
        return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("embedding", "changes what goes into its layers"),
        ("layers", "not have as many layers as its config says"),
        ("parameter", "not made of one list of layers"),
    ],
)
def test_what_a_stage_would_miss_is_refused(change, message, tmp_path):
    model = model_of(tiny_config("granite"), tmp_path)
    if change == "embedding":
        model.model.__class__ = Louder
    if change == "parameter":
        model.model.scale = torch.nn.Parameter(torch.ones(1))
    number = 3 if change == "layers" else 2
    with pytest.raises(MeshError, match=message):
        StagePart(model, range(1, number), number).check_entry(torch.empty(0))


@pytest.mark.parametrize("idle", [0, 1])
def test_a_stage_with_nothing_to_train_is_refused(idle, tmp_path):
    model = model_of(tiny_config("mistral"), tmp_path)
    stages = {n: StagePart(copy.deepcopy(model), range(n, n + 1), 2) for n in (0, 1)}
    mesh = TrainingMesh(ParallelConfig(pp=2), ProcessContext(), None)
    check_trained(stages, mesh)
    stages[idle].requires_grad_(False)
    with pytest.raises(MeshError, match=f"all that stage {idle} of 2 has is frozen"):
        check_trained(stages, mesh)


def test_what_later_stages_would_not_be_given_is_refused():
    pixels = torch.ones(3)
    assert told_beside({"pixel_values": pixels, "labels": None}) == {"pixel_values": pixels}
    with pytest.raises(MeshError, match="input_ids, position_ids and pictures, not attention_mask"):
        told_beside({"attention_mask": torch.ones(1, 3), "pixel_values": pixels})
