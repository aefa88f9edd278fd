"""vLLM as a teacher's engine: what it makes of given tokens, against passes in double precision."""

import asyncio
import os
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from engines_forked import may_fork  # noqa: E402
from tiny_models import random_qwen3, write_random  # noqa: E402
from transformers import AutoModelForCausalLM, DeepseekV3Config  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    EngineClosedError,
    EngineMemoryError,
    EngineSettingsError,
    EngineSetup,
    PromptTooLongError,
    TokenRangeError,
    VLLMConfig,
    cpu_environment,
)

# "default": vLLM's own warnings are no errors in a process that is forked from this one either
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
SIZE, CONTEXT, TOP = 64, 128, 30  # more candidates than the 20 that vLLM gives by itself


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_qwen3(0, vocabulary=SIZE, context=CONTEXT).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> Path:
    """With DeepSeek's attention, in the one width that vLLM's kernel for CPUs has."""
    path = tmp_path_factory.mktemp("latent")
    config = DeepseekV3Config(
        vocab_size=SIZE,
        max_position_embeddings=CONTEXT,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        v_head_dim=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=16,
        head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=None,
        n_shared_experts=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    )
    write_random(config, path)
    return path


@pytest.fixture(autouse=True)
def environment():
    before = dict(os.environ)
    os.environ.update(cpu_environment())
    yield
    os.environ.clear()
    os.environ.update(before)


async def test_scores_are_those_of_a_pass_in_double_precision(model: Path):
    config = VLLMConfig(dtype="float32", kv_cache_mib=16)
    scorer = await config.build_scorer(
        EngineSetup(model_path=model, may_fork=may_fork()), top_k=TOP
    )
    try:
        assert scorer.context_length == CONTEXT
        texts = [[(i * 7 + j * j) % SIZE for j in range(3 + 9 * i)] for i in range(13)]
        wanted = [(0, 1, TOP)[i % 3] for i in range(13)]
        asked = (scorer.score(text, k) for text, k in zip(texts, wanted, strict=True))
        scored = await asyncio.gather(*asked)
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
        for text, top_k, scores in zip(texts, wanted, scored, strict=True):
            with torch.no_grad():
                table = network(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
            own = table[torch.arange(len(text) - 1), torch.tensor(text[1:])].numpy()
            np.testing.assert_allclose(scores.logprobs, [0.0, *own], atol=1e-4)
            assert scores.top_token_ids.shape == (len(text), top_k)
            best = table.topk(top_k).values.numpy() if top_k else np.zeros((len(text) - 1, 0))
            np.testing.assert_allclose(scores.top_logprobs[1:], best, atol=1e-4)
            named = np.take_along_axis(table.numpy(), scores.top_token_ids[1:], axis=1)
            np.testing.assert_allclose(named, best, atol=1e-4)
        again = await scorer.score(texts[5], wanted[5])  # from what is kept of the first time
        np.testing.assert_allclose(again.logprobs, scored[5].logprobs, atol=1e-5)
        with pytest.raises(PromptTooLongError):
            await scorer.score([1] * CONTEXT, 0)
        with pytest.raises(TokenRangeError, match="64 is outside"):
            await scorer.score([1, SIZE], 0)
    finally:
        await scorer.aclose()
    with pytest.raises(EngineClosedError):
        await scorer.score([1, 2], 0)


async def test_latent_attention_is_that_of_transformers(latent: Path):
    config = VLLMConfig(dtype="float32", kv_cache_mib=32)
    scorer = await config.build_scorer(EngineSetup(model_path=latent, may_fork=may_fork()), top_k=1)
    try:
        text = [5, 17, 3, 60, 41, 8, 22, 35, 1, 9]
        scores = await scorer.score(text, 0)
    finally:
        await scorer.aclose()
    network = AutoModelForCausalLM.from_pretrained(latent).float().eval()
    with torch.no_grad():
        table = network(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    own = table[torch.arange(len(text) - 1), torch.tensor(text[1:])].numpy()
    np.testing.assert_allclose(scores.logprobs, [0.0, *own], atol=1e-4)


async def test_an_argument_that_vllm_does_not_have_is_refused_by_name(model: Path):
    config = VLLMConfig(extra={"max_num_seq": 4})
    with pytest.raises(EngineSettingsError, match=r"extra\.max_num_seq.*'max_num_seqs'"):
        await config.build(EngineSetup(model_path=model))


def memory_of_a_device() -> int:
    """Return the bytes of what is vLLM's device on a CPU: the first node, which may not be all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    node = Path("/sys/devices/system/node/node0/meminfo")
    if not node.exists():
        return total
    (kib,) = re.findall(r"MemTotal: +(\d+) kB", node.read_text())
    return min(total, int(kib) << 10)


async def test_a_cache_that_what_is_left_of_memory_cannot_hold_is_an_error_that_names_it(
    model: Path,
):
    """Nearly all of the memory there is: never all of it is free."""
    config = VLLMConfig(dtype="float32", kv_cache_mib=int(memory_of_a_device() * 0.99) >> 20)
    with pytest.raises(EngineMemoryError, match=r"(?s)Available memory.*kv_cache_mib is \d+"):
        await config.build(EngineSetup(model_path=model))
