"""Every family through a real engine: after an update it is, and says, what a fresh engine does."""

import json

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # Importing vLLM is in it.

UNLIKE = ["qwen3-moe", "phi3", "gpt-oss"]
"""Experts one by one, checkpoints with a fused qkv, experts in one tensor with biases."""
ALL = [
    *("llama2", "llama3", "qwen2.5", "qwen3", "qwen3-tied", "qwen3-moe"),
    *("mistral", "phi3", "gpt-oss"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("--weightsync-all-families", default=False)
    metafunc.parametrize("family", ALL if everything else UNLIKE)


@pytest.fixture(scope="module")
def engines(start, tmp_path_factory):
    process = start("vllm_engines_process.py", {"folder": str(tmp_path_factory.mktemp("models"))})
    process.answer(560)
    return process


def test_an_updated_engine_is_a_fresh_one(engines, family):
    found = engines.ask("check", family=family)
    assert "error" not in found, json.dumps(found)
    before, after, fresh = found["before"], found["after"], found["fresh"]
    assert before["tokens"] != fresh["tokens"]
    assert after["tokens"] == fresh["tokens"]
    assert after["logprobs"] == fresh["logprobs"]
    assert after["bits"] == fresh["bits"]
    assert "; 0 left to the engine's loader; 0 not used" in found["report"]
