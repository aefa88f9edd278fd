"""Every decoder of transformers that can be made small computes, as it is loaded for training, what
transformers computes of each sample by itself with its attention spelled out, to be served.

Some are wrong by transformers' own default: torch's attention drops bounded scores, masks are not
told of positions, routers leave experts to chance.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import tiny_config, write_random
from torch.nn.utils.rnn import pad_sequence

from cosmos_parallel import (
    MeshError,
    ModelConfig,
    PackingError,
    ParallelConfig,
    build_mesh,
    check_packable,
    load_causal_lm,
    runs_packed_rows,
)
from cosmos_parallel.rope_length import hold_length

LENGTHS = (13, 6, 17, 9)
# with rows of several samples; chunks, states and attention of their own are not among them
KINDS = """
afmoe apertus arcee aria_text axk1 biogpt bitnet cohere cohere2 cohere2_moe cwm deepseek_v3
diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4
glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
jais2 jetmoe laguna llama longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral
ministral3 mistral mixtral modernbert-decoder moshi nanochat olmo olmo2 olmo3 olmoe opt persimmon
phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
vaultgemma youtu
"""
PACKED = KINDS.split()
PADDED = {
    "bloom": "attention of this bloom model",
    "deepseek_v4": "compressed_sparse_attention",
    "doge": "dynamic-mask layers",
    "glm_moe_dsa": "indexed_attention layers",
    "kimi_linear": "linear_attention layers",
    "llama4_text": "chunked_attention layers",
    "minimax": "linear_attention layers",
    "mpt": "attention of this mpt model",
    "nemotron_h": "linear_attention",
    "qwen3_5_text": "linear_attention layers",
    "qwen3_next": "linear_attention layers",
    "recurrent_gemma": "convolution layers",
    "rwkv": "attention of this rwkv model",
    "xglm": "attention of this xglm model",
}


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS]


def made(kind: str, directory: Path) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Return a model loaded to be trained, and the reference's logits [T, V] of each sample."""
    write_random(tiny_config(kind), directory)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = [reference(input_ids=s[None], use_cache=False).logits[0] for s in samples()]
    held = ModelConfig(implementation="transformers")
    return load_causal_lm(directory, build_mesh(ParallelConfig()), held), expected


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    largest = max(float(logits.abs().max()) for logits in expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * largest)


@torch.no_grad()
def assert_padded_rows_are_right(model: torch.nn.Module, expected: list[torch.Tensor]) -> None:
    tokens = pad_sequence(samples(), batch_first=True)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    assert_close([row[:n] for row, n in zip(logits, LENGTHS, strict=True)], expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKED)
def test_rows_of_one_sample_and_of_several_are_what_each_sample_is_by_itself(kind, tmp_path):
    model, expected = made(kind, tmp_path)
    assert_padded_rows_are_right(model, expected)
    check_packable(model)
    assert runs_packed_rows(model)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        logits = model(
            input_ids=torch.cat(samples())[None], position_ids=positions[None], use_cache=False
        ).logits[0]
    assert_close(logits.split(LENGTHS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PADDED)
def test_other_decoders_are_right_padded_and_refuse_to_pack(kind, tmp_path):
    model, expected = made(kind, tmp_path)
    assert_padded_rows_are_right(model, expected)
    assert not runs_packed_rows(model)
    with pytest.raises(PackingError, match=PADDED[kind]):
        check_packable(model)


@pytest.mark.parametrize("kind", ["bert", "roberta", "bert-generation"])
def test_encoders_are_refused(kind, tmp_path):
    write_random(tiny_config(kind), tmp_path)
    with pytest.raises(MeshError, match=f"this {kind} model is no decoder"):
        load_causal_lm(tmp_path, build_mesh(ParallelConfig()))


def test_dropout_of_a_part_of_a_model_is_off_and_stays_in_its_config(tmp_path):
    config = transformers.Gemma3Config(
        text_config=tiny_config("gemma3_text").to_dict() | {"attention_dropout": 0.5},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "attention_dropout": 0.25,
        },
        mm_tokens_per_image=4,
    )
    write_random(config, tmp_path)
    model = load_causal_lm(tmp_path, build_mesh(ParallelConfig()))
    assert model.config.text_config.attention_dropout == 0.5
    assert model.config.vision_config.attention_dropout == 0.25
    with torch.no_grad():
        first, second = (model(input_ids=samples()[0][None]).logits for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


LONG = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 8.0],
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}


@pytest.mark.parametrize("kind", LONG)
def test_a_rotary_embedding_that_goes_by_length_is_held_at_that_of_the_context(kind, tmp_path):
    sizes = {"original_max_position_embeddings": 16}
    if kind == "dynamic":
        sizes = {"max_position_embeddings": 16}
    config = tiny_config("phi3" if kind == "longrope" else "llama")
    config = type(config)(**config.to_dict() | sizes | {"rope_parameters": LONG[kind]})
    write_random(config, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    short = samples()[0][None]
    # what follows a token does not change its logits, but for frequencies that go by the end
    whole = torch.cat([short, torch.ones(1, 64 - short.shape[1], dtype=torch.int64)], dim=1)
    model = load_causal_lm(tmp_path, build_mesh(ParallelConfig()), ModelConfig(context_length=64))
    usual = load_causal_lm(tmp_path, build_mesh(ParallelConfig()))
    own = load_causal_lm(tmp_path, build_mesh(ParallelConfig()), ModelConfig(context_length=0))
    with torch.no_grad():
        expected = reference(input_ids=whole).logits[:, : short.shape[1]]
        torch.testing.assert_close(model(input_ids=short).logits, expected, rtol=0, atol=1e-5)
        alone = reference(input_ids=short).logits
        for model in (usual, own):
            torch.testing.assert_close(model(input_ids=short).logits, alone, rtol=0, atol=1e-5)
    assert float((alone - expected).abs().max()) > 0.1


def test_cp_asks_for_the_length_that_a_rank_does_not_see(tmp_path):
    write_random(tiny_config("llama"), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    hold_length(model, None, is_divided=True)  # goes by no length
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(MeshError, match=r"rotary embedding of this llama model .* context_length"):
        hold_length(model, None, is_divided=True)
