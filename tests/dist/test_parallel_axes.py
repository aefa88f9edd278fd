"""Every family under every parallel axis takes the steps that one process of transformers takes.

CI runs the cases marked so; ``--parallel-axes all`` runs the table.
"""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from process_trees import run_tree
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_kimi, tiny_muse, write_random

pytestmark = pytest.mark.timeout(0)  # one tree of processes runs every case, within a deadline
POOL = Path(__file__).with_name("parallel_pool.py")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
LATENT = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
SIGHT = {
    "text_config": GROUPED
    | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
    },
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama-2": lambda: transformers.LlamaConfig(**SIZES, pad_token_id=0),
    "llama-3": lambda: transformers.LlamaConfig(**GROUPED, rope_parameters=SCALED, pad_token_id=40),
    "qwen-2.5": lambda: transformers.Qwen2Config(**GROUPED, pad_token_id=0),
    "qwen-2.5-vl": lambda: transformers.Qwen2_5_VLConfig(**SIGHT),
    "qwen-3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    # a layer is enough where each is compiled by itself
    "qwen-3-short": lambda: transformers.Qwen3Config(
        **GROUPED | {"num_hidden_layers": 1}, head_dim=8
    ),
    "qwen-3-tied": lambda: transformers.Qwen3Config(
        **GROUPED | {"tie_word_embeddings": True}, head_dim=8, pad_token_id=63
    ),
    "qwen-3-moe": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=8, num_experts=8, **EXPERTS
    ),
    "moonlight-moe": lambda: transformers.DeepseekV3Config(**SIZES, **EXPERTS, **LATENT),
    "kimi-2.5": tiny_kimi,
    "gpt-oss": lambda: transformers.GptOssConfig(
        **GROUPED,
        head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=4,
        pad_token_id=0,
    ),
    # of transformers only; layers that look back over a window, alone or between others
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=4),
    "gemma": lambda: transformers.GemmaConfig(
        **GROUPED | {"tie_word_embeddings": True}, head_dim=8
    ),
    "gemma-3": lambda: transformers.Gemma3TextConfig(
        **GROUPED | {"tie_word_embeddings": True}, head_dim=8, sliding_window=4
    ),
    "phi": lambda: transformers.PhiConfig(
        **{name: value for name, value in GROUPED.items() if name != "rms_norm_eps"}
    ),
    "phi-3": lambda: transformers.Phi3Config(**GROUPED, pad_token_id=0),
    # of mixtures that only transformers computes, those that `tiny_config` cannot make small
    "deepseek-2": lambda: transformers.DeepseekV2Config(
        **SIZES, num_experts_per_tok=2, moe_intermediate_size=16, topk_method="greedy", **LATENT
    ),
    "dots-1": lambda: transformers.Dots1Config(
        **GROUPED,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "gemma-4": lambda: transformers.Gemma4TextConfig(
        **GROUPED | {"tie_word_embeddings": True},
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        num_kv_shared_layers=0,
        sliding_window=4,
    ),
}
STATES = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # outputs of a state are next to nothing where a query hits no key, and are divided by their
    # size: with the usual 1e-6 a change of the weights by 1e-7 is one of the gradient by 4e-4
    "rms_norm_eps": 1e-2,
}
EYES = {**SIGHT["vision_config"], "num_position_embeddings": 16}
# with a part that sees, which is not asked here, and a language model in transformers by itself
FAMILIES |= {
    "muse-glimmer": tiny_muse,
    "qwen-3.5": lambda: transformers.Qwen3_5Config(
        text_config=GROUPED | STATES | {"head_dim": 8},
        vision_config=EYES,
        tie_word_embeddings=False,
    ),
    "qwen-3.5-moe": lambda: transformers.Qwen3_5MoeConfig(
        text_config=GROUPED
        | STATES
        | {
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
        vision_config=EYES,
        tie_word_embeddings=False,
    ),
    "llama-4-vl": lambda: transformers.Llama4Config(
        text_config=FAMILIES["llama-4"]().to_dict(),
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "image_size": 28,
        },
    ),
}
NARROW = {name: value for name, value in GROUPED.items() if name != "rms_norm_eps"}
FAMILIES |= {
    "llama-4": lambda: transformers.Llama4TextConfig(
        **NARROW | {"intermediate_size": 16},
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        attention_chunk_size=4,
        no_rope_layers=[1, 1, 1, 0],
        pad_token_id=0,
    ),
    "longcat": lambda: transformers.LongcatFlashConfig(
        vocab_size=64,
        hidden_size=32,
        num_attention_heads=4,
        num_layers=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        head_dim=8,
        **{name: LATENT[name] for name in LATENT if name.endswith(("_dim", "kv_lora_rank"))},
        q_lora_rank=16,
    ),
    "inkling": lambda: transformers.InklingTextConfig(
        **{name: value for name, value in NARROW.items() if name != "tie_word_embeddings"},
        head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_shared_experts=2,
        num_experts_per_tok=2,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=4,
        d_rel=4,
        rel_extent=16,
        pad_token_id=0,
        logits_mup_width_multiplier=1.0,
    ),
}
# decoders that only transformers computes, besides those above, by the axes that they have
BY_BOTH = (
    "apertus",
    "arcee",
    "aria_text",
    "axk1",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "gemma2",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_neox",
    "granite",
    "granitemoe_swa",
    "helium",
    "hrm_text",
    "hy_v3",
    "hyperclovax",
    "jais2",
    "laguna",
    "mellum",
    "mimo_v2_flash",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mixtral",
    "nanochat",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "qwen2_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "starcoder2",
    "vaultgemma",
    "youtu",
)
BY_TENSOR = (
    "axk2",
    "deepseek_v32",
    "glm_moe_dsa",
    "hy_v4",
    "kimi_linear",
    "minimax",
    "minimax_m3_vl_text",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
BY_CONTEXT = (
    "afmoe",
    "biogpt",
    "bitnet",
    "cohere",
    "diffllama",
    "gpt2",
    "gpt_bigcode",
    "granite_swa",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jetmoe",
    "modernbert-decoder",
    "opt",
    "persimmon",
    "phimoe",
)
OTHERS = (*BY_BOTH, *BY_TENSOR, *BY_CONTEXT)
FAMILIES |= {kind: partial(tiny_config, kind) for kind in OTHERS}
INTERLEAVED = {"pp": 2, "pp_schedule": "Interleaved1F1B"}
ZERO_BUBBLE = {"pp": 2, "pp_schedule": "ZBVZeroBubble"}
LAYOUTS = {
    "fsdp4": (4, {}),
    "ddp2": (2, {"dp_replicate": 2}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2-interleaved": (2, INTERLEAVED),
    "pp2-zero-bubble": (2, ZERO_BUBBLE),
    "pp2-interleaved-zero-bubble": (2, {"pp": 2, "pp_schedule": "InterleavedZeroBubble"}),
    "ep2": (2, {"ep": 2}),
    "fsdp2-tp2": (4, {"tp": 2}),
    "fsdp2-cp2": (4, {"cp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "fsdp2-pp2": (4, {"pp": 2}),
    "fsdp2-zero-bubble": (4, ZERO_BUBBLE),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "hsdp2x2-tp2": (8, {"dp_replicate": 2, "tp": 2}),
    "fsdp2-tp2-pp2": (8, {"tp": 2, "pp": 2}),
    "tp2-cp2-interleaved": (8, {"tp": 2, "cp": 2, **INTERLEAVED}),
    "hsdp2x2-ep2": (4, {"dp_replicate": 2, "ep": 2}),
    "fsdp2-tp2-ep4": (4, {"tp": 2, "ep": 4}),
    "fsdp2-cp2-ep2": (4, {"cp": 2, "ep": 2}),
    "ep2-pp2": (4, {"ep": 2, "pp": 2}),
    "fsdp2-tp2-ep2-pp2": (8, {"tp": 2, "ep": 2, "pp": 2}),
}
# further meetings of axes, of one family without experts and one with them
MEETINGS = {
    "tp2-ep2": (2, {"tp": 2, "ep": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "ddp2-tp2": (4, {"dp_replicate": 2, "tp": 2}),
    "cp2-pp2": (4, {"cp": 2, "pp": 2}),
    "fsdp2-tp2-cp2": (8, {"tp": 2, "cp": 2}),
    "fsdp2-cp2-pp2": (8, {"cp": 2, "pp": 2}),
    "hsdp2x2-cp2": (8, {"dp_replicate": 2, "cp": 2}),
    "hsdp2x2-pp2": (8, {"dp_replicate": 2, "pp": 2}),
    "hsdp2x2-tp2-ep4": (8, {"dp_replicate": 2, "tp": 2, "ep": 4}),
    "tp2-cp2-pp2-ep2": (8, {"tp": 2, "cp": 2, "pp": 2, "ep": 2}),
}
MET = {"qwen-3", "qwen-3-moe"}
DATA_ONLY = {"fsdp4", "ddp2", "hsdp2x2"}
WITHOUT_EP = {name for name, (_, degrees) in LAYOUTS.items() if "ep" not in degrees}
GENERIC = DATA_ONLY | {"tp2", "fsdp2-tp2", "hsdp2x2-tp2", "cp2", "fsdp2-cp2", "tp2-cp2"}
# of transformers' own models, cut into stages
STAGED = {name for name, (_, degrees) in LAYOUTS.items() if "pp" in degrees and "ep" not in degrees}
IN_TWO = frozenset({"pp2", "fsdp2-pp2", "tp2-pp2", "fsdp2-tp2-pp2"})  # stages, of two layers
ALLOWED = {
    "qwen-3-short": set(),
    "qwen-3-moe": set(LAYOUTS),
    "moonlight-moe": set(LAYOUTS),
    "gpt-oss": set(LAYOUTS),
    "kimi-2.5": set(LAYOUTS),
    "qwen-3.5-moe": set(LAYOUTS),
    **dict.fromkeys(BY_BOTH, frozenset({"tp2", "cp2"})),
    **dict.fromkeys(BY_TENSOR, frozenset({"tp2"})),
    **dict.fromkeys(BY_CONTEXT, frozenset({"cp2"})),
    **dict.fromkeys(("mixtral", "glm4_moe", "glm4_moe_lite"), GENERIC | IN_TWO),
    **dict.fromkeys(
        (
            "deepseek-2",
            "dots-1",
            "gemma-4",
            "llama-4",
            "llama-4-vl",
            "longcat",
            "inkling",
        ),
        frozenset({"tp2", "fsdp2-tp2"}),
    ),
    **dict.fromkeys(("gemma", "gemma-3"), GENERIC | STAGED),
    **dict.fromkeys(("qwen-2.5-vl", "mistral", "phi", "phi-3"), GENERIC | STAGED),
}
# what CI runs: every axis, every family, and combinations that meet in few places
IN_CI = {
    ("llama-2", "fsdp4"),
    ("llama-3", "tp2"),
    ("qwen-2.5", "pp2"),
    ("qwen-2.5-vl", "pp4"),
    ("qwen-3", "pp2-zero-bubble"),
    ("qwen-3", "tp2-cp2-interleaved"),
    ("qwen-3-tied", "cp2"),
    ("qwen-3-tied", "fsdp2-zero-bubble"),
    ("gemma", "fsdp2-tp2-pp2"),
    ("mistral", "cp2-pp2"),
    ("qwen-3-moe", "hsdp2x2-ep2"),
    ("moonlight-moe", "fsdp2-tp2-ep4"),
    ("moonlight-moe", "ep2-pp2"),
    ("muse-glimmer", "fsdp2-cp2"),
    ("mistral", "pp2-zero-bubble"),
    ("phi", "pp2-interleaved"),
    ("phi-3", "tp2"),
    ("gemma2", "cp2"),
    ("glm4_moe", "fsdp2-pp2"),
}
SEEING = frozenset({"kimi-2.5", "muse-glimmer", "qwen-3.5", "qwen-3.5-moe"})
TABLE = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if layout in ALLOWED.get(family, WITHOUT_EP)
]
TABLE += [
    (family, layout)
    for family in sorted(MET)
    for layout, (_, degrees) in MEETINGS.items()
    if family == "qwen-3-moe" or "ep" not in degrees
]
TABLE += [("mistral", "cp2-pp2"), ("qwen-2.5-vl", "cp2-pp2")]
LAYOUTS |= MEETINGS
# parallelism of transformers' own implementations, adapters, compiled layers, and what native
# models do besides
EXTRA = {
    "generic-tp2": {"model": "llama-2", "degrees": {"tp": 2}, "implementation": "transformers"},
    "generic-states-fsdp2-tp2": {
        "model": "qwen-3.5",
        "degrees": {"tp": 2, "dp_shard": 2},
        "implementation": "transformers",
    },
    "packed-generic-pp2": {
        "model": "qwen-3",
        "degrees": INTERLEAVED,
        "packed": True,
        "implementation": "transformers",
    },
    "recomputed-generic-pp2": {
        "model": "llama-2",
        "degrees": {"pp": 2},
        "checkpointing": "full",
        "implementation": "transformers",
    },
    "generic-experts-tp2-pp2": {
        "model": "qwen-3-moe",
        "degrees": {"pp": 2, "tp": 2},
        "implementation": "transformers",
    },
    "generic-cp2": {"model": "llama-3", "degrees": {"cp": 2}, "implementation": "transformers"},
    "packed-cp2": {"model": "qwen-3", "degrees": {"cp": 2}, "packed": True},
    "packed-generic-cp2": {
        "model": "qwen-3",
        "degrees": {"cp": 2},
        "packed": True,
        "implementation": "transformers",
    },
    "packed-sinks-tp2": {
        "model": "gpt-oss",
        "degrees": {"tp": 2},
        "packed": True,
        "implementation": "native",
    },
    "packed-zero-bubble-pp2": {"model": "moonlight-moe", "degrees": ZERO_BUBBLE, "packed": True},
    "recomputed-tp2": {"model": "qwen-3-moe", "degrees": {"tp": 2}, "checkpointing": "full"},
    "recomputed-generic-tp2": {
        "model": "llama-2",
        "degrees": {"tp": 2},
        "checkpointing": "full",
        "implementation": "transformers",
    },
    "adapters-tp2-cp2": {"model": "qwen-3", "degrees": {"tp": 2, "cp": 2}, "lora": True},
    "generic-sinks-cp2": {
        "model": "gpt-oss",
        "degrees": {"cp": 2},
        "packed": True,
        "implementation": "transformers",
    },
    "adapters-of-experts-cp2": {"model": "qwen-3-moe", "degrees": {"cp": 2}, "lora": True},
    "adapters-of-experts-tp2": {"model": "qwen-3-moe", "degrees": {"tp": 2}, "lora": True},
    "adapters-of-experts-fsdp2": {"model": "qwen-3-moe", "degrees": {}, "lora": True},
    "adapters-of-experts-pp2": {"model": "qwen-3-moe", "degrees": {"pp": 2}, "lora": True},
    "adapters-of-experts-zero-bubble": {
        "model": "qwen-3-moe",
        "degrees": ZERO_BUBBLE,
        "lora": True,
    },
    **{
        f"adapters-{layout}": {"model": "qwen-3", "degrees": LAYOUTS[layout][1], "lora": True}
        for layout in LAYOUTS
        if layout.startswith("pp2")
    },
    "adapters-recomputed-pp2": {
        "model": "qwen-3",
        "degrees": {"pp": 2},
        "checkpointing": "full",
        "lora": True,
    },
    "adapters-fsdp2-pp2": {"model": "qwen-3", "degrees": {"dp_shard": 2, "pp": 2}, "lora": True},
    "adapters-tp2-zero-bubble": {
        "model": "qwen-3",
        "degrees": {"tp": 2, **ZERO_BUBBLE},
        "lora": True,
    },
    "eight-bits-fsdp2-pp2": {
        "model": "qwen-3",
        "degrees": {"dp_shard": 2, "pp": 2},
        "eight_bits": True,
    },
    "eight-bits-zero-bubble": {"model": "qwen-3", "degrees": ZERO_BUBBLE, "eight_bits": True},
    "packed-native-cp2": {
        "model": "kimi-2.5",
        "degrees": {"cp": 2},
        "packed": True,
        "implementation": "native",
    },
    "packed-windows-cp2": {
        "model": "muse-glimmer",
        "degrees": {"cp": 2},
        "packed": True,
        "implementation": "native",
    },
    "packed-states-cp4": {
        "model": "qwen-3.5",
        "degrees": {"cp": 4},
        "packed": True,
        "implementation": "native",
    },
    "recomputed-states-cp2": {
        "model": "qwen-3.5-moe",
        "degrees": {"cp": 2},
        "checkpointing": "full",
        "implementation": "native",
    },
    "generic-capped-tp2": {
        "model": "muse-glimmer",
        "degrees": {"tp": 2},
        "implementation": "transformers",
    },
    **{
        f"compiled-{implementation}-{layout}": {
            "model": "qwen-3-short",
            "degrees": degrees,
            "packed": True,
            "implementation": implementation,
            "compile": "aot_eager",
        }
        for implementation in ("native", "transformers")
        for layout, degrees in {"fsdp2": {}, "tp2": {"tp": 2}}.items()
    },
    # rows divided between the parts of a layer, where torchtitan's implementation always does so
    **{
        f"sequence-{family}-{layout}": {
            "model": family,
            "degrees": degrees,
            "implementation": "transformers",
            "sequence": True,
        }
        for family, layout, degrees in (
            ("qwen-2.5-vl", "tp2", {"tp": 2}),
            ("gemma", "fsdp2-tp2", {"tp": 2, "dp_shard": 2}),
            ("phi", "tp2-cp2", {"tp": 2, "cp": 2}),
            ("mistral", "tp2-pp2", {"tp": 2, **ZERO_BUBBLE}),
            ("mixtral", "tp2", {"tp": 2}),
        )
    },
    "sequence-packed-recomputed-tp2": {
        "model": "qwen-3",
        "degrees": {"tp": 2},
        "implementation": "transformers",
        "packed": True,
        "checkpointing": "full",
        "sequence": True,
    },
    "sequence-adapters-tp2": {
        "model": "llama-2",
        "degrees": {"tp": 2},
        "implementation": "transformers",
        "lora": True,
        "sequence": True,
    },
    "exported-pp2": {"model": "moonlight-moe", "degrees": {"pp": 2}, "export": "exported"},
    "exported-sight-pp2": {"model": "kimi-2.5", "degrees": {"pp": 2}, "export": "exported-sight"},
    "exported-generic-pp2": {
        "model": "glm4_moe",
        "degrees": {"pp": 2},
        "export": "exported-generic",
    },
    "exported-tied-pp2": {
        "model": "qwen-3-tied",
        "degrees": {"pp": 2},
        "export": "exported-tied",
    },
}
# tens of seconds each, of torch's compiler or of DTensor, beside rows of the same code
LONG = {
    "adapters-tp2-cp2",
    "adapters-tp2-zero-bubble",
    "compiled-native-fsdp2",
    "compiled-native-tp2",
    "compiled-transformers-fsdp2",
    "compiled-transformers-tp2",
    "packed-states-cp4",
    "recomputed-tp2",
    "sequence-adapters-tp2",
    "sequence-gemma-fsdp2-tp2",
    "sequence-mistral-tp2-pp2",
    "sequence-mixtral-tp2",
}


def selected(option: str) -> list[tuple[str, str]]:
    return TABLE if option == "all" else [case for case in TABLE if case in IN_CI]


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption("--parallel-axes")
    if "case" in metafunc.fixturenames:
        cases = selected(option)
        metafunc.parametrize("case", cases, ids=["-".join(case) for case in cases])
    if "name" in metafunc.fixturenames:
        names = EXTRA if option == "all" else [name for name in EXTRA if name not in LONG]
        metafunc.parametrize("name", names)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Return where the tiny models are, once there are results."""
    return tmp_path_factory.mktemp("axes")


@pytest.fixture(scope="module")
def results(models, request) -> dict:
    """Run the cases of the tests that are selected, in one tree of processes."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = [getattr(item, "callspec", None) for item in here]
    chosen = [spec.params["case"] for spec in asked if spec and "case" in spec.params]
    further = {spec.params["name"] for spec in asked if spec and "name" in spec.params}
    further |= {spec.params["layout"] for spec in asked if spec and "layout" in spec.params}
    if any("export" in item.name for item in here):
        further |= {name for name in EXTRA if name.startswith("exported-")}
    whole = {"degrees": {}, "num_ranks": 1, "implementation": "transformers"}
    used = {family for family, _ in chosen} | {EXTRA[name]["model"] for name in further}
    cases = [{"name": family, "model": family, **whole} for family in FAMILIES if family in used]
    packed = {EXTRA[name]["model"] for name in further if EXTRA[name].get("packed")}
    # a state of transformers goes on from one sample of a row into the next
    apart = {m: {"implementation": "native"} for m in packed if "qwen-3.5" in m}
    cases += [
        {"name": f"packed-{m}", "model": m, "packed": True, **whole, **apart.get(m, {})}
        for m in packed
    ]
    adapted = {EXTRA[name]["model"] for name in further if EXTRA[name].get("lora")}
    cases += [{"name": f"adapted-{m}", "model": m, "lora": True, **whole} for m in adapted]
    rounded = {EXTRA[name]["model"] for name in further if EXTRA[name].get("eight_bits")}
    cases += [{"name": f"rounded-{m}", "model": m, "eight_bits": True, **whole} for m in rounded]
    for family, layout in chosen:
        num_ranks, degrees = LAYOUTS[layout]
        name = f"{family}-{layout}"
        case = {"name": name, "model": family, "num_ranks": num_ranks, "degrees": degrees}
        # of a model that sees, it has to be asked for
        cases.append(case | ({"implementation": "native"} if family in SEEING else {}))
    for name in further:
        degrees = EXTRA[name]["degrees"].values()
        num_ranks = max(2, math.prod(degree for degree in degrees if isinstance(degree, int)))
        cases.append({"name": name, "num_ranks": num_ranks, **EXTRA[name]})
    for family in {case["model"] for case in cases}:
        write_random(FAMILIES[family](), models / family)
    lines = "\n".join(json.dumps(case) for case in cases)
    run_tree(POOL, models, deadline_s=120 + 60 * len(cases), given=lines)
    return {
        case["name"]: json.loads((models / f"{case['name']}.json").read_text()) for case in cases
    }


def steps_of(result: dict, family: str) -> list[list[float]]:
    *steps, last = result["steps"]
    # what a token costs: with a projector of pictures where transformers has it
    return [*steps, [*last[:2], *last[3:]]] if family in SEEING else [*steps, last]


def assert_same_steps(found: dict, reference: dict, family: str) -> None:
    assert "error" not in found, found["error"]
    mine_and_theirs = zip(steps_of(found, family), steps_of(reference, family), strict=True)
    for mine, theirs in mine_and_theirs:
        # loss, gradient norm, rows; at last the loss of the weights and of their averages, and
        # what a token costs
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_a_layout_takes_the_steps_of_one_process(results, case):
    assert_same_steps(results["-".join(case)], results[case[0]], case[0])


@pytest.mark.slow
def test_other_implementations_and_packed_rows_take_them_too(results, name):
    reference = EXTRA[name]["model"]
    if EXTRA[name].get("packed"):
        reference = f"packed-{reference}"
    elif EXTRA[name].get("lora"):
        reference = f"adapted-{reference}"
    elif EXTRA[name].get("eight_bits"):
        reference = f"rounded-{reference}"
    assert_same_steps(results[name], results[reference], EXTRA[name]["model"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in EXTRA if EXTRA[name].get("lora")])
def test_adapters_of_a_layout_are_written_as_those_of_one_process(models, results, layout):
    found, expected = (
        load_file(models / f"{each}-adapter" / "adapter_model.safetensors")
        for each in (layout, f"adapted-{EXTRA[layout]['model']}")
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = torch.linalg.vector_norm(found[name] - value)
        assert difference <= 1e-4 * torch.linalg.vector_norm(value), name


@pytest.mark.slow
@pytest.mark.parametrize("exported", ["exported-pp2", "exported-generic-pp2", "exported-tied-pp2"])
def test_an_export_from_stages_has_every_weight(models, results, exported):
    assert "error" not in results[exported]
    directory = models / EXTRA[exported]["export"]
    written = load_file(directory / "model.safetensors")
    original = load_file(models / EXTRA[exported]["model"] / "model.safetensors")
    assert {name: value.shape for name, value in written.items()} == {
        name: value.shape for name, value in original.items()
    }
    kept = [name for name, value in original.items() if torch.equal(written[name], value)]
    # every parameter was updated; the router's correction is no parameter
    corrections = [name for name in original if name.endswith("gate.e_score_correction_bias")]
    expected = {"moonlight-moe": 3, "glm4_moe": 1, "qwen-3-tied": 0}
    assert len(corrections) == expected[EXTRA[exported]["model"]]
    assert sorted(kept) == sorted(corrections)
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(loading.values())


@pytest.mark.slow
def test_an_export_from_stages_has_what_sees_as_it_was(models, results):
    assert "error" not in results["exported-sight-pp2"]
    written = load_file(models / "exported-sight" / "model.safetensors")
    original = load_file(models / "kimi-2.5" / "model.safetensors")
    assert written.keys() == original.keys()
    kept = {name for name, value in original.items() if torch.equal(written[name], value)}
    assert kept == {
        *(name for name in original if name.startswith(("vision_tower.", "mm_projector."))),
        *(
            f"language_model.model.layers.{layer}.mlp.gate.e_score_correction_bias"
            for layer in (1, 2, 3)
        ),
    }
    _, loading = transformers.AutoModelForImageTextToText.from_pretrained(
        models / "exported-sight", output_loading_info=True
    )
    assert not any(loading.values())
