"""vLLM serves what is exported from torchtitan's implementation, with the same log-probs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

# one engine after the other in one process: importing vLLM is most of the time
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
directories, tokens = json.loads(sys.argv[1]), json.loads(sys.argv[2])
found = {}
for name, path in directories.items():
    engine = LLM(
        model=path, skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        kv_cache_memory_bytes=32 << 20, max_model_len=64, logprobs_mode="raw_logprobs",
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    found[name] = [
        scores[token].logprob
        for token, scores in zip(tokens[1:], answer.prompt_logprobs[1:])
    ]
    engine.llm_engine.engine_core.shutdown()
print("FOUND" + json.dumps(found))
"""
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
}
TOKENS = [5, 17, 3, 60, 41, 8, 22, 35]


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Export a model of every family; return where, and transformers' log-probs of the original."""
    import transformers

    from cosmos_parallel import (
        ModelConfig,
        ParallelConfig,
        build_mesh,
        export_hf,
        load_causal_lm,
    )

    mesh, made = build_mesh(ParallelConfig()), {}
    for name, (kind, more) in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**SIZES | more)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        source = tmp_path_factory.mktemp(name)
        model.save_pretrained(source)
        native = load_causal_lm(source, mesh, ModelConfig(implementation="native"))
        export_hf(native, source / "exported", mesh)
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
        made[name] = source / "exported", scores[range(len(TOKENS) - 1), TOKENS[1:]]
    return made


@pytest.fixture(scope="module")
def served(exported) -> dict[str, list[float]]:
    """Ask vLLM, in a process of its own, for the log-probs of every exported model."""
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            SERVE,
            json.dumps({name: str(path) for name, (path, _) in exported.items()}),
            json.dumps(TOKENS),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
        check=False,
    )
    line = next((line for line in process.stdout.splitlines() if line.startswith("FOUND")), None)
    assert line is not None, process.stderr[-3000:]
    return json.loads(line.removeprefix("FOUND"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_serves_an_export_with_the_log_probs_of_the_original(exported, served, family):
    _, expected = exported[family]
    torch.testing.assert_close(torch.tensor(served[family]), expected, rtol=0, atol=1e-4)
