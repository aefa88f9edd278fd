"""What a layout asks of a model, decided from its config alone."""

import subprocess
import sys

import pytest
import transformers

from cosmos_parallel import (
    LoraConfig,
    LowPrecisionConfig,
    MeshError,
    ModelConfig,
    ParallelConfig,
    check_layout,
    check_trainable,
    supported_models,
)
from cosmos_parallel.families import choose_implementation, generic_axes, native_refusal
from cosmos_parallel.models import chosen_implementation

DENSE = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def qwen3(**changes):
    return transformers.Qwen3Config(**DENSE | changes)


def mixture(**changes):
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
    return transformers.Qwen3MoeConfig(**DENSE | sizes | changes)


def qwen35(**changes):
    return transformers.Qwen3_5TextConfig(**DENSE | changes)


def qwen35_mixture(**changes):
    return transformers.Qwen3_5MoeTextConfig(**DENSE | {"num_experts": 8} | changes)


@pytest.mark.parametrize(
    ("config", "degrees", "num_ranks", "message"),
    [
        (qwen3(), {"tp": 4}, 4, "tp 4 does not divide its 6 attention heads; tp 4 does not divide"),
        (qwen3(num_key_value_heads=3), {"tp": 2}, 2, "tp 2 does not divide its 3 key-value heads"),
        (qwen3(intermediate_size=99), {"tp": 2}, 4, "does not divide its 99 feed-forward features"),
        (qwen3(), {"pp": 8}, 8, "pp 8 with schedule 1F1B makes 8 stages, more than its 6 layers"),
        (
            qwen3(),
            {"pp": 4, "pp_schedule": "Interleaved1F1B"},
            4,
            "schedule Interleaved1F1B makes 8 stages, more than its 6 layers",
        ),
        (qwen3(tie_word_embeddings=True), {"pp": 2}, 2, None),
        (qwen3(tie_word_embeddings=True), {"pp": 2, "cp": 2}, 4, None),
        # only torchtitan's implementation has these axes
        (
            mixture(tie_word_embeddings=True),
            {"pp": 2, "ep": 2},
            4,
            "pp 2 puts embedding and output head on different ranks",
        ),
        (
            qwen35(tie_word_embeddings=True),
            {"pp": 2, "cp": 2},
            4,
            "pp 2 puts embedding and output head on different ranks",
        ),
        (qwen3(), {"ep": 2}, 2, "ep 2 needs a mixture of experts, and this model has none"),
        (mixture(), {"ep": 4}, 4, "ep 4 does not divide its 6 experts"),
        (mixture(moe_intermediate_size=9), {"tp": 2}, 2, "does not divide its 9 features of an ex"),
        (mixture(), {"dp_replicate": 2, "ep": 3}, 6, None),
        # with experts divided by ep, their features are not divided by tp
        (mixture(moe_intermediate_size=9), {"tp": 2, "ep": 2}, 4, None),
        (mixture(), {"tp": 2, "cp": 2, "pp": 2, "ep": 2}, 8, None),
        (qwen3(), {"tp": 3}, 5, "5 ranks cannot be divided by tp 3"),
        (transformers.GPT2Config(), {"pp": 2}, 2, "pp 2 needs torchtitan's implementation, but mo"),
        (transformers.GPT2Config(), {"tp": 2}, 2, "a gpt2 model of transformers can have dp_repl"),
        (transformers.MistralConfig(**DENSE), {"tp": 2, "cp": 2}, 4, None),
        (transformers.MixtralConfig(**DENSE), {"tp": 2, "cp": 2}, 4, None),
        (
            transformers.MixtralConfig(**DENSE | {"intermediate_size": 99}),
            {"tp": 2},
            2,
            "mixtral model: tp 2 does not divide its 99 feed-forward features",
        ),
        (
            transformers.Glm4MoeConfig(**DENSE, moe_intermediate_size=9),
            {"tp": 2},
            2,
            "glm4_moe model: tp 2 does not divide its 9 features of an expert",
        ),
        (transformers.MistralConfig(**DENSE), {"pp": 2, "tp": 2}, 4, None),
        (transformers.Qwen2_5_VLConfig(tie_word_embeddings=False), {"pp": 2}, 2, None),
        (transformers.Qwen2_5_VLConfig(tie_word_embeddings=True), {"pp": 2}, 2, None),
        (transformers.MistralConfig(**DENSE), {"pp": 2, "cp": 2}, 4, None),
        (transformers.GraniteConfig(**DENSE, embedding_multiplier=12.0), {"pp": 2}, 2, None),
        (
            transformers.Qwen3VLConfig(
                text_config=DENSE, vision_config={"deepstack_visual_indexes": [5, 11, 17]}
            ),
            {"pp": 3},
            3,
            "what it sees enters its first 3 layers, and the first of 3 stages would have 2",
        ),
        (
            transformers.MistralConfig(
                **DENSE, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}
            ),
            {"pp": 2},
            2,
            "pp 2 does not divide weights of few bits",
        ),
        # layers that share keys and values, or several streams; pictures seen both ways
        (transformers.Gemma4TextConfig(), {"pp": 2}, 2, "pp 2 needs torchtitan's implementation"),
        (transformers.Gemma3Config(), {"pp": 2}, 2, "can have dp_replicate, dp_shard, cp, tp"),
        (qwen35(), {"tp": 2, "pp": 2}, 4, None),
        (qwen35(), {"cp": 2, "tp": 2}, 4, None),
        (qwen35_mixture(), {"cp": 2, "ep": 2, "pp": 2}, 4, None),
        (qwen35(linear_num_key_heads=3), {"tp": 2}, 2, "its 3 key heads of linear attention"),
        (qwen35(linear_num_value_heads=15), {"tp": 2}, 2, "15 value heads of linear attention"),
        (qwen35(tie_word_embeddings=True), {"pp": 2}, 2, None),
        (qwen35_mixture(), {"tp": 2, "ep": 4}, 4, None),
        (
            qwen35_mixture(shared_expert_intermediate_size=9),
            {"tp": 2},
            2,
            "tp 2 does not divide its 9 features of the shared expert",
        ),
    ],
)
def test_a_layout_is_refused_before_anything_starts(config, degrees, num_ranks, message):
    if message is None:
        assert check_layout(config, ParallelConfig(**degrees), num_ranks).ep == degrees.get("ep", 1)
        return
    with pytest.raises(MeshError, match=message):
        check_layout(config, ParallelConfig(**degrees), num_ranks)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (qwen3(), None),
        (mixture(), None),
        (qwen3(attention_bias=True), "biases in attention"),
        (transformers.LlamaConfig(**DENSE), None),
        (transformers.LlamaConfig(**DENSE, mlp_bias=True), "biases in the feed-forward"),
        (transformers.LlamaConfig(**DENSE, hidden_act="gelu"), "activation gelu"),
        (mixture(mlp_only_layers=[1]), "layers without experts between those with"),
        (
            transformers.Qwen2Config(**DENSE, use_sliding_window=True, max_window_layers=1),
            "sliding-window attention",
        ),
        (transformers.MistralConfig(**DENSE), "model type mistral is none of llama, qwen2"),
        (transformers.GptOssConfig(**DENSE), None),
        (transformers.GptOssConfig(**DENSE, attention_bias=False), "no biases in attention"),
        # as the checkpoints are published; save_pretrained of a dequantised one is plain
        (
            transformers.GptOssConfig(**DENSE, quantization_config={"quant_method": "mxfp4"}),
            "weights of few bits",
        ),
    ],
)
def test_torchtitan_computes_what_it_has(config, reason):
    refusal = native_refusal(config)
    assert refusal is None if reason is None else reason in str(refusal)


@pytest.mark.parametrize(
    ("degrees", "wanted", "chosen"),
    [
        ({}, "auto", "transformers"),
        ({}, "native", "native"),
        ({"dp_replicate": 2}, "auto", "transformers"),
        ({"tp": 2}, "auto", "native"),
        ({"tp": 2}, "transformers", "transformers"),
        ({"pp": 2}, "auto", "native"),
        ({"pp": 2}, "transformers", "transformers"),
    ],
)
def test_transformers_is_used_unless_an_axis_asks_for_more(degrees, wanted, chosen):
    parallel = ParallelConfig(**degrees)
    assert choose_implementation(qwen3(), parallel, wanted) == chosen


def test_one_matrix_for_embedding_and_head_is_cut_by_transformers_code_alone():
    tied, parallel = qwen3(tie_word_embeddings=True), ParallelConfig(pp=2)
    assert choose_implementation(tied, parallel, "auto") == "transformers"
    with pytest.raises(MeshError, match="torchtitan's implementation does not have one matrix"):
        check_layout(tied, parallel, 2, implementation="native")


def test_rows_are_divided_where_layers_alone_see_hidden_states():
    rows, ranks = ModelConfig(sequence_parallel=True), ParallelConfig(tp=2)
    check_trainable(transformers.MistralConfig(**DENSE), rows, ranks, 2)
    check_trainable(qwen3(), rows, ranks, 2)  # torchtitan's, which always divides them
    seeing = transformers.Qwen3VLConfig(
        text_config=DENSE, vision_config={"deepstack_visual_indexes": [0]}
    )
    check_trainable(seeing, rows, ParallelConfig(), 2)
    with pytest.raises(MeshError, match="sequence_parallel: in qwen3_vl more than layers"):
        check_trainable(seeing, rows, ranks, 2)
    with pytest.raises(ValueError, match="sequence_parallel are not compiled"):
        ModelConfig(sequence_parallel=True, compile="aot_eager")


def seeing_qwen(**ties):
    whole = {name: ties[name] for name in ("tie_word_embeddings",) if name in ties}
    words = DENSE | {"tie_word_embeddings": ties.get("words", False)}
    return transformers.Qwen3_5Config(text_config=words, **whole)


def kimi(*, tied=False, **text):
    words = transformers.DeepseekV3Config(**DENSE | {"num_key_value_heads": 6} | text)
    return transformers.Kimi_K25Config(text_config=words.to_dict(), tie_word_embeddings=tied)


def muse(**text):
    return transformers.MuseGlimmerConfig(text_config=DENSE | {"num_hidden_layers": 3} | text)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (kimi(), None),
        (kimi(tied=True), "one matrix for embedding and output head"),
        (kimi(rope_interleave=False), "rotary embedding on halves"),
        # as the checkpoints are published
        (kimi(quantization_config={"quant_method": "compressed-tensors"}), "weights of few bits"),
        (
            transformers.Kimi_K25Config(text_config=qwen3().to_dict()),
            "language model is of type qw",
        ),
        (muse(), None),
        (muse(hidden_activation="gelu"), "activation gelu"),
        (muse(tie_word_embeddings=True), "one matrix for embedding and output head"),
        (muse(layer_rope_theta=[10000.0, 0, 500000.0]), "layers with rotary bases of their own"),
        (seeing_qwen(), None),
        (seeing_qwen(tie_word_embeddings=True, words=True), None),
        # which transformers ties, and torchtitan would not
        (seeing_qwen(words=True), "one matrix for embedding and output head"),
        (seeing_qwen(tie_word_embeddings=True), "one matrix for embedding and output head"),
    ],
)
def test_the_language_model_of_one_that_sees_is_looked_at(config, reason):
    refusal = native_refusal(config)
    assert refusal is None if reason is None else reason in str(refusal)


@pytest.mark.parametrize(
    ("degrees", "chosen"),
    [({"tp": 2}, "transformers"), ({"pp": 2}, "native"), ({"ep": 2}, "native")],
)
def test_a_model_that_sees_is_torchtitans_where_it_has_to_be(degrees, chosen):
    assert choose_implementation(kimi(), ParallelConfig(**degrees), "auto") == chosen


def test_what_is_asked_for_is_not_silently_exchanged():
    with pytest.raises(MeshError, match=r"ep 2 needs torchtitan's .* transformers is asked for"):
        choose_implementation(mixture(), ParallelConfig(ep=2), "transformers")
    with pytest.raises(MeshError, match=r"native needs torchtitan's .* activation gelu"):
        choose_implementation(qwen3(hidden_act="gelu"), ParallelConfig(), "native")


def test_every_family_of_the_readme_is_listed_with_its_axes():
    by_type = {support.model_type: support for support in supported_models()}
    assert len(by_type) > 100
    dense = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    assert {kind: by_type[kind].axes for kind in ("llama", "qwen2", "qwen3")} == {
        "llama": dense,
        "qwen2": dense,
        "qwen3": dense,
    }
    for kind in ("qwen3_moe", "deepseek_v3", "gpt_oss"):
        assert by_type[kind].axes == (*dense, "ep")
    assert by_type["kimi_k25"].axes == (*dense, "ep")
    assert by_type["muse_glimmer"].axes == dense
    assert by_type["qwen3_5"].axes == dense
    assert by_type["qwen3_5_moe_text"].axes == (*dense, "ep")
    assert by_type["qwen3_5"].native
    assert by_type["deepseek_v3"].families == "DeepSeek-V3, Moonlight-MoE"
    assert not by_type["qwen2_5_vl"].native
    generic = ("dp_replicate", "dp_shard", "cp", "tp")
    seeing = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    for kind in (*seeing, "mistral", "gemma", "gemma3_text", "phi", "phi3"):
        assert by_type[kind].axes == (*generic, "pp")
    # they see, and count tokens of pictures as those of text
    for kind in ("llava", "llava_next", "internvl", "mistral3", "aya_vision", "idefics3"):
        assert by_type[kind].axes == (*generic, "pp")
    # it caps its scores; mixtures of experts
    for kind in ("gemma2", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v2"):
        assert by_type[kind].axes == (*generic, "pp")
    # tokens of a picture see each other both ways; nothing said of a pipeline
    for kind in ("gemma3", "olmoe"):
        assert by_type[kind].axes == generic
    for kind in ("gpt2", "phimoe"):
        assert by_type[kind].axes == ("dp_replicate", "dp_shard", "cp")
    # experts that compute nothing, results that are added to in place, layers inside layers
    for kind in ("longcat_flash", "llama4", "llama4_text", "gemma4", "inkling_text"):
        assert "tp" in by_type[kind].axes
    assert "tp" not in by_type["diffusion_gemma"].axes
    # attention of its own, chunks of a row, pictures that see each other otherwise than Gemma 3
    for kind in ("bloom", "llama4_text", "doge", "phi4_multimodal", "gemma4", "mllama", "glm4v"):
        assert "cp" not in by_type[kind].axes
    # some of their layers hand a state from token to token, which would end with a rank's stretch
    for kind in ("qwen3_next", "qwen4_exp_text", "olmo_hybrid"):
        assert "cp" not in by_type[kind].axes
    assert "cp" not in generic_axes(qwen35())


@pytest.mark.parametrize(
    "kind",
    [
        *("Mistral", "Phi3", "Qwen2_5_VL", "Qwen3VL", "Qwen3Next", "OlmoHybrid"),
        *("Mixtral", "Llama4", "Llava", "InternVL"),
    ],
)
def test_listed_axes_are_those_of_a_config(kind):
    config = getattr(transformers, f"{kind}Config")()
    by_type = {support.model_type: support for support in supported_models()}
    assert generic_axes(config) == by_type[config.model_type].axes


def test_without_triton_there_is_no_native_implementation():
    without = """
import sys
sys.modules["triton"] = None
import transformers
from cosmos_parallel.families import native_refusal
print(native_refusal(transformers.LlamaConfig()))
"""
    told = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert "triton, which it imports, is not installed" in told.stdout, told.stderr


@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_a_value_head_takes_no_axis_away(axis):
    check_trainable(qwen3(), ModelConfig(value_head=True), ParallelConfig(**{axis: 2}), 2)


@pytest.mark.parametrize("axis", ["dp_shard", "tp", "cp", "pp"])
def test_transformers_models_have_a_value_head_under_their_axes(axis):
    parallel = ParallelConfig(**{axis: 2})
    mistral = transformers.MistralConfig(**DENSE)
    check_trainable(mistral, ModelConfig(value_head=True), parallel, 2)
    check_trainable(qwen3(), ModelConfig(value_head=True, lora=LoraConfig()), parallel, 2)


@pytest.mark.parametrize(
    "held",
    [ModelConfig(lora=LoraConfig()), ModelConfig(low_precision=LowPrecisionConfig())],
    ids=["adapters", "8 bits"],
)
def test_adapters_and_8_bits_are_divided_among_stages(held):
    mistral, parallel = transformers.MistralConfig(**DENSE), ParallelConfig(pp=2)
    check_trainable(mistral, held, parallel, 2)
    assert chosen_implementation(mistral, held, parallel) == "transformers"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelConfig(activation_checkpointing="selective"),
            "activation_checkpointing is 'selective'; it must be one of 'none', 'full'",
        ),
        (lambda: ModelConfig(dtype="float16"), "dtype is 'float16'"),
        (lambda: ModelConfig(compile="eager"), "compile is 'eager'"),
        (lambda: ModelConfig(attention="flex"), "attention is 'flex'"),
        (lambda: ModelConfig(implementation="titan"), "implementation is 'titan'"),
        (lambda: ParallelConfig(pp_schedule="GPipe"), "pp_schedule is 'GPipe'"),
        (lambda: LowPrecisionConfig(recipe="blockwise"), "recipe is 'blockwise'"),
    ],
)
def test_names_that_nobody_knows_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
