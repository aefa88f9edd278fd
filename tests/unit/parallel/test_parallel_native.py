"""torchtitan's implementation of every family against transformers', weights read from files."""

import json

import pytest
import torch
import transformers
from recorded_shapes import RecordedShapes
from safetensors.torch import load_file
from tiny_models import name_as_published, stack_experts

from cosmos_parallel import (
    Learner,
    LearnerConfig,
    ModelConfig,
    ModelMismatchError,
    ParallelConfig,
    PictureError,
    TokenIdError,
    build_mesh,
    check_packable,
    export_hf,
    load_causal_lm,
    read_config,
    runs_packed_rows,
    sft_loss,
)

NATIVE = ModelConfig(implementation="native")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "routed_scaling_factor": 2.446,
}
FAMILIES = {
    "llama-2": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama-3": transformers.LlamaConfig(**SIZES, rope_parameters=SCALED),
    "qwen-2.5": transformers.Qwen2Config(**SIZES),
    "qwen-2.5-tied": transformers.Qwen2Config(**SIZES | {"tie_word_embeddings": True}),
    "qwen-3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen-3-tied": transformers.Qwen3Config(**SIZES | {"tie_word_embeddings": True}, head_dim=8),
    "qwen-3-moe": transformers.Qwen3MoeConfig(**SIZES, head_dim=8, norm_topk_prob=True, **EXPERTS),
    # not normalised over the chosen experts
    "qwen-3-moe-raw": transformers.Qwen3MoeConfig(**SIZES, head_dim=8, **EXPERTS),
    "moonlight-moe": transformers.DeepseekV3Config(**SIZES | LATENT),
    # with low-rank queries and experts chosen group by group
    "deepseek-v3": transformers.DeepseekV3Config(
        **SIZES | LATENT | {"q_lora_rank": 12, "n_group": 4, "topk_group": 2}
    ),
}
FAMILIES["gpt-oss"] = transformers.GptOssConfig(
    # its layers take turns: one looks back over 4 tokens, one over all; YaRN by default
    **SIZES,
    head_dim=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=4,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# of which attention's scores are scaled too, and of which cosine and sine are
FAMILIES["deepseek-v3-yarn"] = transformers.DeepseekV3Config(
    **SIZES | LATENT, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
)
FAMILIES["deepseek-v3-yarn-raw"] = transformers.DeepseekV3Config(
    **SIZES | LATENT, rope_parameters=YARN
)
SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
FAMILIES["kimi-2.5"] = transformers.Kimi_K25Config(
    text_config=transformers.DeepseekV3Config(
        **SIZES | LATENT | {"q_lora_rank": 12},
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ).to_dict(),
    vision_config=SIGHT,
    projection_hidden_size=16,
    image_token_id=62,
    video_token_id=63,
    tie_word_embeddings=False,
)
# layers take turns as published: three that look back over 4 tokens and turn, one that does neither
FAMILIES["muse-glimmer"] = transformers.MuseGlimmerConfig(
    text_config={
        **SIZES,
        "num_hidden_layers": 5,
        "head_dim": 8,
        "sliding_window": 4,
        "final_logit_softcapping": 2.0,
        "output_multiplier": 0.7,
        "rms_norm_eps": 1e-3,
        "post_norm_eps": 1e-2,
    },
    vision_config=SIGHT,
    out_hidden_size=64,
    projector_hidden_size=16,
    image_token_id=62,
    video_token_id=63,
)
STATES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    # next to nothing comes out of a state at times, and is divided by its size
    "rms_norm_eps": 1e-3,
}
EYES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
FAMILIES["qwen-3.5-words"] = transformers.Qwen3_5TextConfig(**SIZES | STATES)
FAMILIES["qwen-3.5"] = transformers.Qwen3_5Config(
    text_config=SIZES | STATES, vision_config=EYES, tie_word_embeddings=False
)
# as the small ones are published
FAMILIES["qwen-3.5-tied"] = transformers.Qwen3_5Config(
    text_config=SIZES | STATES | {"tie_word_embeddings": True},
    vision_config=EYES,
    tie_word_embeddings=True,
)
FAMILIES["qwen-3.5-moe"] = transformers.Qwen3_5MoeConfig(
    text_config=SIZES | STATES | EXPERTS | {"shared_expert_intermediate_size": 24},
    vision_config=EYES,
    tie_word_embeddings=False,
)
FAMILIES["qwen-3.5-moe-stacked"] = FAMILIES["qwen-3.5-moe"]
# a token of a picture is no word
TOKENS = torch.randint(0, 62, (2, 13), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def mesh():
    return build_mesh(ParallelConfig())


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return a function from a family to a directory with random weights, norms and biases too."""
    made = {}

    def build(family):
        if family not in made:
            torch.manual_seed(0)
            config = FAMILIES[family]
            model = auto_class(config).from_config(config).float()
            tensors = [*model.named_parameters(), *model.named_buffers()]
            for name, tensor in tensors:
                if "inv_freq" not in name:
                    mean = 1.0 if "norm" in name else 0.0
                    torch.nn.init.normal_(tensor, mean=mean, std=0.2)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
            if family.startswith("kimi"):
                name_as_published(made[family])
            if family.endswith("stacked"):
                stack_experts(made[family])
        return made[family]

    return build


def auto_class(config):
    seeing = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM


def logits_of(model, **inputs):
    with torch.no_grad():
        return model(use_cache=False, **inputs).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_before_and_after_an_export(
    directories, mesh, tmp_path, family
):
    path = directories(family)
    model = load_causal_lm(path, mesh, NATIVE)
    whole = auto_class(FAMILIES[family])
    expected = whole.from_pretrained(path).eval()
    reference = logits_of(expected, input_ids=TOKENS)
    torch.testing.assert_close(logits_of(model, input_ids=TOKENS), reference, rtol=0, atol=1e-4)
    export_hf(model, tmp_path / "out", mesh)
    stored = load_file(path / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], value) for name, value in stored.items())
    again, loading = whole.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    assert torch.equal(logits_of(again.eval(), input_ids=TOKENS), reference)


@pytest.mark.parametrize(
    "family",
    ["qwen-3", "moonlight-moe", "gpt-oss", "kimi-2.5", "muse-glimmer", "qwen-3.5", "qwen-3.5-moe"],
)
def test_packed_samples_do_not_see_each_other(directories, mesh, family):
    model = load_causal_lm(directories(family), mesh, NATIVE)
    check_packable(model)
    # layers with a state pad every sample to the longest
    assert runs_packed_rows(model) != family.startswith("qwen-3.5")
    positions = torch.cat([torch.arange(5), torch.arange(8)]).expand(2, 13)
    with RecordedShapes() as recorded:
        packed = logits_of(model, input_ids=TOKENS, position_ids=positions)
    assert not any(shape[-2:] == (13, 13) for shape in recorded.shapes)
    alone = torch.cat(
        [logits_of(model, input_ids=part) for part in (TOKENS[:, :5], TOKENS[:, 5:])], dim=1
    )
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("kimi-2.5", "kimi_k25"), ("muse-glimmer", "muse_glimmer"), ("qwen-3.5", "qwen3_5")],
)
def test_pictures_are_refused_where_only_words_are_computed(directories, mesh, family, kind):
    model = load_causal_lm(directories(family), mesh, NATIVE)
    with pytest.raises(PictureError, match=f"takes no pixel_values: train a {kind} model on pict"):
        model(input_ids=TOKENS, pixel_values=torch.zeros(4, 3, 14, 14))


def test_a_token_beyond_an_embedding_with_a_norm_is_refused(directories, mesh):
    model = load_causal_lm(directories("muse-glimmer"), mesh, NATIVE)
    with pytest.raises(TokenIdError, match="token id 64 at row 0, column 1"):
        model(input_ids=torch.tensor([[1, 64]]))


def test_only_columns_that_are_asked_for_are_projected(directories, mesh):
    model = load_causal_lm(directories("qwen-3"), mesh, NATIVE)
    whole = logits_of(model, input_ids=TOKENS)
    columns = torch.tensor([2, 7])
    kept = logits_of(model, input_ids=TOKENS, logits_to_keep=columns)
    torch.testing.assert_close(kept, whole[:, columns], rtol=0, atol=1e-6)
    last = logits_of(model, input_ids=TOKENS, logits_to_keep=3)
    torch.testing.assert_close(last, whole[:, -3:], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [
        ("qwen-3-moe", "none"),
        ("qwen-3-moe", "full"),
        ("gpt-oss", "none"),
        ("kimi-2.5", "none"),
        ("muse-glimmer", "none"),
        ("muse-glimmer", "full"),
        ("qwen-3.5", "full"),
        ("qwen-3.5-moe", "none"),
    ],
)
def test_a_step_is_that_of_transformers(directories, mesh, family, checkpointing):
    from cosmos_parallel import SftBatch

    trainable = torch.rand(2, 13, generator=torch.Generator().manual_seed(5)) < 0.6
    batch = SftBatch(token_ids=TOKENS, trainable=trainable, position_ids=None, num_tokens=26)
    reports = [
        Learner(
            load_causal_lm(
                directories(family),
                mesh,
                ModelConfig(
                    implementation=kind,
                    activation_checkpointing=checkpointing,
                    attention="eager" if family == "gpt-oss" else "sdpa",
                ),
            ),
            LearnerConfig(),
            mesh=mesh,
        ).step([batch], sft_loss)
        for kind in ("native", "transformers")
    ]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-6)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)
    assert reports[0].metrics == reports[1].metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, "missing weights: model"),
        ({"intermediate_size": 40}, r"gate_proj.weight is \(48, 32\), the config says \(40, 32\)"),
    ],
)
def test_weights_of_another_config_are_refused(directories, mesh, tmp_path, changes, message):
    source = directories("qwen-3")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelMismatchError, match=message):
        load_causal_lm(tmp_path, mesh, NATIVE)


def test_a_torn_weight_file_is_refused(directories, mesh, tmp_path):
    source = directories("qwen-3")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelMismatchError, match=r"model.safetensors cannot be read"):
        load_causal_lm(tmp_path, mesh, NATIVE)


def test_the_config_of_a_directory_is_read(directories):
    assert read_config(directories("llama-3")).model_type == "llama"
