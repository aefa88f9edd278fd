"""The longest context of a model is what vLLM itself lets it have, and not one token more."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import transformers

from cosmos_rollout import longest_context

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def rope(kind: str, **others) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


def long_rope() -> dict:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return rope("longrope", **factors, original_max_position_embeddings=32)


CASES = {
    "plain": (transformers.Qwen3Config, {}, 64),
    "linear": (transformers.LlamaConfig, rope("linear", factor=2.0), 128),
    "dynamic": (transformers.LlamaConfig, rope("dynamic", factor=4.0), 256),
    "yarn": (
        transformers.Qwen3Config,
        rope("yarn", factor=4.0, original_max_position_embeddings=16),
        64,
    ),
    "longrope": (
        transformers.Phi3Config,
        {**long_rope(), "original_max_position_embeddings": 32, "pad_token_id": 0},
        64,
    ),
    "gemma3": (transformers.Gemma3TextConfig, {}, 64),
    "gpt2": (transformers.GPT2Config, {"n_positions": 48, "n_embd": 32, "n_head": 2}, 48),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_longest_context_is_what_vllm_takes(name: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    kind, settings, expected = CASES[name]
    config = kind(**({} if name == "gpt2" else SMALL) | settings)
    config.architectures = [
        kind.__name__.replace("TextConfig", "Config").replace(
            "Config", "LMHeadModel" if name == "gpt2" else "ForCausalLM"
        )
    ]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert longest_context(tmp_path) == expected

    def chosen(length: int) -> int:
        settings = {"model": str(tmp_path), "skip_tokenizer_init": True, "enforce_eager": True}
        return EngineArgs(**settings, max_model_len=length).create_model_config().max_model_len

    assert chosen(expected) == expected
    with pytest.raises(ValueError, match=f"max_model_len .{expected + 1}. is greater than"):
        chosen(expected + 1)
