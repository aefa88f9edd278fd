"""Every family through a real engine: after an update it is, and says, what a fresh engine does."""

import json
from typing import Any

import pytest
from with_amx import WITH_AMX

pytest.importorskip("vllm")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # Importing vLLM is in it.

UNLIKE = ["qwen3-moe", "deepseek-v3", "phi3"]
"""Experts in one tensor, latent attention, checkpoints with a fused qkv."""
ALL = [
    *("llama2", "llama3", "qwen2.5", "qwen3", "qwen3-tied", "qwen3-moe", "qwen2.5-vl"),
    *("deepseek-v3", "moonlight", "mistral", "gemma", "gemma2", "gemma3", "phi2", "phi3"),
    "gpt-oss",
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" not in metafunc.fixturenames:
        return
    everything = metafunc.config.getoption("--weightsync-all-families", default=False)
    metafunc.parametrize("family", ALL if everything else UNLIKE)


@pytest.fixture(scope="module")
def engines(start, tmp_path_factory):
    process = start("vllm_engines_process.py", {"folder": str(tmp_path_factory.mktemp("models"))})
    process.answer(560)
    return process


def test_an_updated_engine_is_a_fresh_one(engines, family):
    check(engines.ask("check", family=family))


def test_an_updated_engine_is_a_fresh_one_in_bfloat16(engines):
    """Small matrices and experts are packed for AMX then, where there is AMX."""
    check(engines.ask("check", family="qwen3-moe", dtype="bfloat16"))


@pytest.mark.parametrize("kind", ["fp8", "mxfp8", "nvfp4"])
def test_an_engine_serves_what_the_sender_quantised(engines, kind):
    """FP8 by rows; the others by vLLM's own emulation, as it has no kernels for a CPU."""
    check(engines.ask("check_quantised", kind=kind, family="llama3"))


@WITH_AMX
@pytest.mark.parametrize("model", ["llama3", "qwen3-moe", "deepseek-v3"])
def test_an_engine_serves_blocks_of_fp8(engines, model):
    """Of matrices, of experts, and of latent attention, whose scales vLLM works into others."""
    check(engines.ask("check_quantised", kind="fp8-block", family=f"{model}-of-blocks"))


def check(found: dict[str, Any]) -> None:
    assert "error" not in found, json.dumps(found)
    before, after, fresh = found["before"], found["after"], found["fresh"]
    assert before["logprobs"] != fresh["logprobs"]
    assert after["tokens"] == fresh["tokens"]
    assert after["logprobs"] == fresh["logprobs"]
    assert after["bits"] == fresh["bits"]
    assert f"; 0 left to the engine's loader; {found['unused']} not used" in found["report"]
