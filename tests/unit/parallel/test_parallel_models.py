"""Loading and exporting Hugging Face models in one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from cosmos_parallel import (
    ExportError,
    MeshError,
    ModelConfig,
    ModelMismatchError,
    ModelNotFoundError,
    ParallelConfig,
    build_mesh,
    check_model_directory,
    decoder_layers,
    export_hf,
    load_causal_lm,
)
from cosmos_parallel.compiling import compile_layers
from cosmos_parallel.generic_weights import num_parameters

IDS = torch.arange(20).view(2, 10)
MODELS = [("Qwen3", True), ("Qwen3", False), ("Llama", False), ("Mistral", True)]
MODELS += [("Gemma", True), ("Qwen3Moe", False)]


@pytest.fixture
def mesh():
    return build_mesh(ParallelConfig())


def load_reference(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_logits_equal_transformers_before_and_after_export(
    model_directory, mesh, tmp_path, kind, tied
):
    path = model_directory(kind, tied=tied)
    model = load_causal_lm(path, mesh)
    with torch.no_grad():
        expected = load_reference(path)(IDS).logits
        torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=0)
        next(model.parameters()).mul_(1.5)
        changed = model(IDS).logits
        export_hf(model, tmp_path / "out", mesh, tokenizer_dir=path)
        torch.testing.assert_close(load_reference(tmp_path / "out")(IDS).logits, changed)
    before, after = (json.loads((p / "config.json").read_text()) for p in (path, tmp_path / "out"))
    assert after == before


def test_the_blocks_are_the_decoder_layers(model_directory, mesh):
    layers = decoder_layers(load_causal_lm(model_directory("Qwen3Moe", tied=False), mesh))
    assert [type(layer).__name__ for layer in layers] == ["Qwen3MoeDecoderLayer"] * 2
    plain = torch.nn.Sequential(
        torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(5)]),
        torch.nn.ModuleList([torch.nn.Linear(9, 9) for _ in range(3)]),
    )
    assert list(decoder_layers(plain)) == list(plain[1])
    assert list(decoder_layers(torch.nn.Linear(1, 1))) == []


def test_export_brings_the_tokenizer(model_directory, mesh, tmp_path):
    from transformers import AutoTokenizer

    path = model_directory()
    export_hf(load_causal_lm(path, mesh), tmp_path / "out", mesh, tokenizer_dir=path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("1+1").input_ids == AutoTokenizer.from_pretrained(path)("1+1").input_ids
    assert tokenizer.chat_template


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_export_brings_how_the_model_generates(model_directory, mesh, tmp_path, implementation):
    path = shutil.copytree(model_directory("Qwen3", tied=False), tmp_path / "base")
    said = {"eos_token_id": [1, 3], "temperature": 0.6, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(said))
    model = load_causal_lm(path, mesh, ModelConfig(implementation=implementation))
    export_hf(model, tmp_path / "out", mesh, tokenizer_dir=path)
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert {name: getattr(found, name) for name in said} == said


def test_export_replaces_what_is_there_and_casts(model_directory, mesh, tmp_path):
    from safetensors.torch import load_file

    model = load_causal_lm(model_directory(), mesh)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.txt").write_text("old")
    export_hf(model, tmp_path / "out", mesh, dtype="bfloat16")
    assert not (tmp_path / "out" / "stale.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    kinds = {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert kinds == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert next(model.parameters()).dtype == torch.float32


def test_weights_are_for_whom_their_config_is(model_directory, mesh, tmp_path):
    export_hf(load_causal_lm(model_directory(), mesh), tmp_path / "out", mesh)
    beside = tmp_path / "out" / "config.json"
    assert beside.with_name("model.safetensors").stat().st_mode == beside.stat().st_mode
    assert not list((tmp_path / "out").glob(".*"))


def test_export_says_where_it_could_not_write(model_directory, mesh, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ExportError, match=r"cannot export to .*file/out"):
        export_hf(load_causal_lm(model_directory(), mesh), tmp_path / "file" / "out", mesh)


def test_paths_may_be_text_and_a_model_of_ones_own_has_no_hugging_face_form(
    model_directory, mesh, tmp_path
):
    export_hf(load_causal_lm(str(model_directory()), mesh), str(tmp_path / "out"), mesh)
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(ExportError, match=r"Linear is no model of transformers.*safetensors"):
        export_hf(torch.nn.Linear(2, 2), tmp_path / "own", mesh)


def test_dropout_is_off_although_the_model_is_in_training_mode(model_directory, mesh):
    model = load_causal_lm(model_directory(), mesh)
    assert model.training
    assert model.config.attention_dropout == 0.1  # as the directory says, for the export
    torch.testing.assert_close(model(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_recomputed_activations_give_the_same_gradient(model_directory, mesh):
    gradients = []
    for activation_checkpointing in ("none", "full"):
        config = ModelConfig(activation_checkpointing=activation_checkpointing)
        model = load_causal_lm(model_directory(), mesh, config)
        model(IDS).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_mixed_precision_by_itself_says_what_it_needs(model_directory, mesh):
    with pytest.raises(MeshError, match="call init_distributed"):
        load_causal_lm(model_directory(), mesh, ModelConfig(compute_dtype="bfloat16"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "does not exist"),
        ([], r"lacks config.json, \*.safetensors, a tokenizer"),
        (["config.json", "tokenizer.json"], r"lacks \*.safetensors;"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "convert them"),
        (["model_index.json"], "diffusers pipeline"),
        (["config.json", "model.safetensors"], r"lacks a tokenizer \(tokenizer.json\)"),
    ],
)
def test_an_incomplete_directory_is_told_what_it_lacks(tmp_path, files, message):
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for name in files:
            (path / name).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=message):
        check_model_directory(path, needs_tokenizer=True)


def test_a_complete_directory_passes(model_directory):
    check_model_directory(model_directory(), needs_tokenizer=True)


def copy_model(source, target):
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "must be equal to the number of `layer_types`"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            "missing weights: model.layers.2",
        ),
        ({"intermediate_size": 40}, "mismatched weights: .*model.layers.0.mlp.down_proj.weight"),
        ({"model_type": "no-such-model"}, "no-such-model"),
    ],
)
def test_weights_of_another_config_are_refused(model_directory, mesh, tmp_path, changes, message):
    copy_model(model_directory(), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelMismatchError, match=message):
        load_causal_lm(tmp_path / "model", mesh)


def test_a_torn_weight_file_is_refused(model_directory, mesh, tmp_path):
    copy_model(model_directory(), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelMismatchError, match="cannot be loaded"):
        load_causal_lm(tmp_path / "model", mesh)


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight


@pytest.mark.parametrize(("tp", "num_compiled"), [(1, 2), (2, 4)])
def test_split_layers_are_compiled_for_each_length_and_whole_ones_for_all(tp, num_compiled):
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()
    layer = Scale()
    compile_layers([layer], backend, ParallelConfig(tp=tp))
    for length in (3, 4, 5, 6):
        assert layer(torch.ones(length, 2)).tolist() == [[2.0, 3.0]] * length
    assert len(compiled) == num_compiled


EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TWOFOLD = {
    "qwen3_5": lambda: transformers.Qwen3_5Config(
        text_config=TEXT
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        vision_config=EYES | {"out_hidden_size": 32, "num_position_embeddings": 16},
    ),
    "llama4": lambda: transformers.Llama4Config(
        text_config=TEXT | {"intermediate_size_mlp": 48, "num_local_experts": 2},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "image_size": 28,
        },
    ),
}


@pytest.mark.parametrize("kind", TWOFOLD)
def test_a_model_that_sees_is_whole_though_its_type_is_one_of_text_too(tmp_path, mesh, kind):
    torch.manual_seed(0)
    original = transformers.AutoModelForImageTextToText.from_config(TWOFOLD[kind]()).eval()
    original.save_pretrained(tmp_path / "original")
    model = load_causal_lm(tmp_path / "original", mesh, ModelConfig(dtype="float32"))
    assert num_parameters(model.config) == sum(p.numel() for p in original.parameters())
    tokens = torch.randint(1, 64, (2, 9))
    with torch.no_grad():
        expected = original(input_ids=tokens).logits
        assert torch.equal(model(input_ids=tokens).logits, expected)
    export_hf(model, tmp_path / "exported", mesh)
    before, after = (tensors_in(tmp_path / name) for name in ("original", "exported"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].to(tensor), tensor) for name, tensor in after.items())


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    files = directory.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
