"""vLLM serves what is exported after training, with the same log-probs, for every family."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import name_as_published

pytest.importorskip("vllm")

# one engine after the other in one process: importing vLLM is most of the time. The kernel that
# turns queries on CPUs takes the distance of heads for that of tokens where queries have three
# dimensions, as in latent attention, so that the form in torch's own operations is used.
SERVE = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[3])
from vllm import LLM, SamplingParams
# vLLM reads attributes of every module there is to find kernels, and those of llvmlite have none
sys.modules |= dict.fromkeys(("numba", "llvmlite"))
from vllm_families import register_here
directories, tokens = json.loads(sys.argv[1]), json.loads(sys.argv[2])
found = {}
for name, path in directories.items():
    folder = pathlib.Path(path)
    register_here(folder)
    engine = LLM(
        model=path, skip_tokenizer_init=not (folder / "tokenizer.json").exists(),
        enforce_eager=True, max_num_seqs=4,
        # a state is computed in bfloat16 alone
        dtype="bfloat16" if name.startswith("qwen3_5") else "float32",
        kv_cache_memory_bytes=32 << 20, max_model_len=int(sys.argv[4]),
        logprobs_mode="raw_logprobs",
        limit_mm_per_prompt={"image": 0, "video": 0},
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
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
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # 512 + 64: the one width that latent attention has a kernel for
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # the widths that there is a kernel for
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-2,
}
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
SEEING = {
    "qwen3_5": {"vision_config": VISION | {"num_position_embeddings": 16}},
    "qwen3_5_moe": {"vision_config": VISION | {"num_position_embeddings": 16}},
    # by vLLM's names too, in which four patches are one token
    "muse_glimmer": {
        "vision_config": _EYES | {"output_dim": 128, "adapter_dim": 32},
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
    "kimi_k25": {"vision_config": _EYES, "projection_hidden_size": 32},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
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
    "moonlight": ("DeepseekV3Config", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 32}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 32, "sliding_window": 4, **EXPERTS}),
    # transformers' default attention drops the bound of its scores
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    # frequencies by the longest sequence that is served
    "phi3": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 16,
                "long_factor": [2.0 + index for index in range(16)],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    # with a part that sees, which is exported as it was read, and asked for text
    "qwen3_5": ("Qwen3_5Config", STATES),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        STATES
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "muse_glimmer": (
        "MuseGlimmerConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 4,
            "pad_token_id": None,
            "final_logit_softcapping": 2.0,
            "output_multiplier": 0.7,
        },
    ),
    "kimi_k25": (
        "Kimi_K25Config",
        {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 32, "pad_token_id": None},
    ),
    # a prompt of text; its images need torchvision, which has no build beside a torch for CPUs
    "qwen2_5_vl": ("Qwen2_5_VLConfig", {"vision_config": VISION}),
}
CONTEXT = 64
TOKENS = [5, 17, 3, 60, 41, 8, 22, 35]


def original_of(name):
    """Return a model of a family with random weights, and how it is loaded to be trained."""
    import transformers

    kind, more = FAMILIES[name]
    sizes = SIZES | more
    if name == "qwen2_5_vl":
        rope = {"type": "mrope", "mrope_section": [4, 6, 6]}
        text = SIZES | {"rope_scaling": rope}
        config = transformers.Qwen2_5_VLConfig(**text, text_config=text, **more)
        make, implementation = transformers.AutoModelForImageTextToText, "transformers"
    elif name in SEEING:
        marks = {"image_token_id": 62, "video_token_id": 63, "tie_word_embeddings": False}
        config = getattr(transformers, kind)(text_config=sizes, **SEEING[name], **marks)
        make, implementation = transformers.AutoModelForImageTextToText, "native"
    else:
        config = getattr(transformers, kind)(**sizes)
        make, implementation = transformers.AutoModelForCausalLM, "native"
    if name in ("gemma2", "phi3"):
        implementation = "transformers"
    torch.manual_seed(0)
    model = make.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model, implementation


def write_tokenizer(folder):
    """Token 7 is the word "7"; the first are what Qwen2.5-VL marks images with."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    marks = ["vision_start", "vision_end", "image_pad", "video_pad", "vision_pad"]
    words = {f"<|{mark}|>": index for index, mark in enumerate(marks)}
    words |= {str(index): index for index in range(len(words), SIZES["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="9"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, request) -> dict[str, tuple[Path, torch.Tensor]]:
    """Export a model of every family that is asked for; return where, and the original's scores."""
    from cosmos_parallel import (
        ModelConfig,
        ParallelConfig,
        build_mesh,
        export_hf,
        load_causal_lm,
    )

    mesh, made = build_mesh(ParallelConfig()), {}
    here = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["family"] for item in here if hasattr(item, "callspec")}
    for name in FAMILIES.keys() & asked:
        model, implementation = original_of(name)
        source = tmp_path_factory.mktemp(name)
        model.save_pretrained(source)
        if name == "kimi_k25":
            name_as_published(source)
        if name == "qwen2_5_vl":
            write_tokenizer(source)
        held = ModelConfig(implementation=implementation, context_length=CONTEXT)
        loaded = load_causal_lm(source, mesh, held)
        export_hf(loaded, source / "exported", mesh)
        # transformers has no say where its own default is another model
        judge = loaded if name in ("gemma2", "phi3") else model
        with torch.no_grad():
            scores = judge(input_ids=torch.tensor([TOKENS])).logits[0].log_softmax(-1)
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
            str(Path(__file__).parent / "weightsync"),
            str(CONTEXT),
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
    # transformers' own log-probs are 0.1 to 0.2 apart in bfloat16, of 4 to 13
    apart = 0.25 if family.startswith("qwen3_5") else 1e-4
    torch.testing.assert_close(torch.tensor(served[family]), expected, rtol=0, atol=apart)
