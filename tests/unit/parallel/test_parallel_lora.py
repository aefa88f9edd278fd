"""Adapters: what is trained, what peft reads back, what a checkpoint of them holds."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from cosmos_parallel import (
    AdamWConfig,
    AdapterError,
    CheckpointMismatchError,
    CheckpointStore,
    Learner,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PeftView,
    adapter_tensors,
    build_mesh,
    export_lora,
    load_causal_lm,
)

peft = pytest.importorskip("peft")

LORA = ModelConfig(lora=LoraConfig(rank=4, alpha=8.0))


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict = field(default_factory=dict)


def next_token(model: nn.Module, ids: torch.Tensor) -> Sums:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="sum")
    return Sums(losses, torch.tensor(float(ids[:, 1:].numel())))


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, 64, (3, 12), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def trained(model_directory):
    """A model whose adapter took three steps."""
    mesh = build_mesh(ParallelConfig())
    model = load_causal_lm(model_directory("Qwen3"), mesh, LORA)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=1e-2)), mesh=mesh)
    reports = [learner.step([ids(0)], next_token) for _ in range(3)]
    return mesh, learner, before, reports


def test_only_the_adapter_is_trained_and_it_starts_as_nothing(trained, model_directory):
    _, learner, before, reports = trained
    changed = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if ".lora_" in n}
    # 7 linear layers in each of 2 blocks, none in the head
    assert len(changed) == 2 * 7 * 2
    plain = AutoModelForCausalLM.from_pretrained(model_directory("Qwen3"))
    expected = next_token(plain, ids(0))
    assert reports[0].loss == pytest.approx((expected.total / expected.weight).item(), rel=1e-6)
    assert reports[2].loss < reports[0].loss


def test_the_gradient_of_b_is_that_of_the_formula(model_directory):
    model = load_causal_lm(model_directory("Qwen3"), build_mesh(ParallelConfig()), LORA)
    layer = model.model.layers[0].self_attn.q_proj
    inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    layer(inputs).sum().backward()
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    # d(sum y)/dB = (alpha / rank) 1 (A x)^T, and dA is 0 while B is 0
    expected = (8.0 / 4) * torch.ones(5, b.shape[0]).T @ (inputs @ a.T)
    torch.testing.assert_close(b.grad, expected, rtol=1e-5, atol=1e-5)
    assert a.grad.abs().max() == 0.0
    assert layer.base_layer.weight.grad is None


def test_what_is_exported_loads_in_peft_with_equal_logits(trained, model_directory, tmp_path):
    mesh, learner, _, _ = trained
    export_lora(learner.model, tmp_path / "adapter", mesh, base=model_directory("Qwen3"))
    base = AutoModelForCausalLM.from_pretrained(model_directory("Qwen3"))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(
        loaded(input_ids=ids(1)).logits, learner.model(input_ids=ids(1)).logits, rtol=0, atol=1e-6
    )
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert config.base_model_name_or_path == str(model_directory("Qwen3"))
    assert (config.r, config.lora_alpha, config.inference_mode) == (4, 8.0, True)


def test_a_checkpoint_of_an_adapter_gives_the_same_next_step(trained, model_directory, tmp_path):
    mesh, learner, _, _ = trained
    store = CheckpointStore(tmp_path, mesh)
    store.save(3, learner, b"")
    expected = [learner.step([ids(2)], next_token).loss for _ in range(2)]
    other = Learner(
        load_causal_lm(model_directory("Qwen3"), mesh, LORA),
        LearnerConfig(optimizer=AdamWConfig(lr=1e-2)),
        mesh=mesh,
    )
    store.load(other)
    assert [other.step([ids(2)], next_token).loss for _ in range(2)] == expected
    store.close()


def test_a_checkpoint_leaves_out_the_base_and_knows_it_again(trained, model_directory, tmp_path):
    mesh, learner, _, _ = trained
    store = CheckpointStore(tmp_path, mesh)
    store.save(3, learner)
    metadata = FileSystemReader(store.path(3)).read_metadata().state_dict_metadata
    saved = {name for name in metadata if name.startswith("model.")}
    assert saved == {f"model.{n}" for n, p in learner.model.named_parameters() if p.requires_grad}
    weight = learner.model.model.layers[1].mlp.up_proj.base_layer.weight.detach()
    weight[0, 0].neg_()
    with pytest.raises(CheckpointMismatchError, match=r"layers\.1\.mlp\.up_proj.*\(1 of 24 frozen"):
        store.load(learner)
    store.close()


def test_a_checkpoint_of_an_earlier_version_has_the_base_too(trained, model_directory, tmp_path):
    mesh, learner, before, _ = trained
    store = CheckpointStore(tmp_path, mesh)
    learner.model.requires_grad_(True)  # then nothing is left out
    store.save(3, learner)
    for name, parameter in learner.model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if ".lora_" not in name:
            parameter.detach().zero_()
    store.load(learner)
    for name, parameter in learner.model.named_parameters():
        assert ".lora_" in name or torch.equal(parameter, before[name])
    store.close()


def test_a_peft_view_names_tensors_as_a_peft_model(model_directory):
    mesh = build_mesh(ParallelConfig())
    model = load_causal_lm(model_directory("Qwen3"), mesh, LORA)
    base = AutoModelForCausalLM.from_pretrained(model_directory("Qwen3"))
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config)
    mine = {n for n, _ in PeftView(model).named_parameters()}
    assert mine == {name for name, _ in theirs.named_parameters()}
    saved = peft.get_peft_model_state_dict(theirs)
    assert set(adapter_tensors(model)) == set(saved)


def test_rank_stabilised_adapters_are_scaled_by_the_root(model_directory):
    config = ModelConfig(lora=LoraConfig(rank=4, alpha=8.0, rank_stabilised=True))
    model = load_causal_lm(model_directory("Qwen3"), build_mesh(ParallelConfig()), config)
    scaling = model.model.layers[0].mlp.up_proj.scaling["default"]
    assert scaling == pytest.approx(8.0 / math.sqrt(4))


def test_layers_that_are_not_there_and_models_without_adapter_are_refused(model_directory):
    mesh = build_mesh(ParallelConfig())
    config = ModelConfig(lora=LoraConfig(targets=("query",)))
    with pytest.raises(AdapterError, match="query"):
        load_causal_lm(model_directory("Qwen3"), mesh, config)
    for layer in ("embed_tokens", "lm_head"):
        config = ModelConfig(lora=LoraConfig(targets=("q_proj", layer)))
        with pytest.raises(AdapterError, match=rf"{layer}: .* are one weight"):
            load_causal_lm(model_directory("Qwen3", tied=True), mesh, config)
    with pytest.raises(AdapterError, match="has no adapter"):
        adapter_tensors(load_causal_lm(model_directory("Qwen3"), mesh))
    with pytest.raises(ValueError, match="rank is 0"):
        LoraConfig(rank=0)
    for alpha in (0.0, -8.0, float("inf")):
        with pytest.raises(ValueError, match=f"alpha is {alpha}; it must be above 0 and finite"):
            LoraConfig(alpha=alpha)
    with pytest.raises(ValueError, match="seed is 9223372036854775808"):
        LoraConfig(seed=1 << 63)
