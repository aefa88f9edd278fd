"""Backend ``"cosmos"`` in a plain vLLM script, against a fresh engine with the new weights."""

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # The engines' start is in it.

SIZES = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
PROMPTS = [[1, 2, 3], [40, 50, 60, 70], [7] * 9]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[str]:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("plain")
    for seed in range(2):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
        model.float().save_pretrained(folder / str(seed))
    return [str(folder / str(seed)) for seed in range(2)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_tokens_are_those_of_a_fresh_engine(start, checkpoints, num_workers):
    old, new = [
        start("vllm_plain_process.py", {"model": path, "num_workers": num_workers})
        for path in checkpoints
    ]
    for engine in (old, new):
        engine.answer(560)
    fresh = new.ask("generate", prompts=PROMPTS)
    before = old.ask("generate", prompts=PROMPTS)
    assert before["tokens"] != fresh["tokens"]

    old.ask("update", path=checkpoints[1])
    after = old.ask("generate", prompts=PROMPTS)
    assert after["tokens"] == fresh["tokens"]
    assert after["logprobs"] == fresh["logprobs"]  # The same bits were computed with.
    assert after["versions"] == [["7"]] * 3

    # And back, by the trainer's end of vLLM's interface; its first version is another.
    old.ask("train", path=checkpoints[0])
    again = old.ask("generate", prompts=PROMPTS)
    assert again["tokens"] == before["tokens"]
    assert again["versions"] == [["2"]] * 3
    old.end()
    new.end()
