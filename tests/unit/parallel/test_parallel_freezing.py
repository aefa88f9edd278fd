"""Parameters chosen by patterns of names stay as they are; all else of training goes on."""

import pytest
import torch
import transformers
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    CheckpointStore,
    EmaConfig,
    FreezeError,
    Learner,
    LearnerConfig,
    LoraConfig,
    LowPrecisionConfig,
    MeshError,
    ModelConfig,
    OptimizerError,
    ParallelConfig,
    SftBatch,
    build_mesh,
    check_trainable,
    chosen_implementation,
    load_causal_lm,
    model_tensors,
    read_config,
    sft_loss,
)

FREEZE = ("model.embed_tokens.*", "*.layers.0.*")
LEARNING = LearnerConfig(optimizer=AdamWConfig(lr=1e-2, weight_decay=0.1), ema=EmaConfig(decay=0.5))


@pytest.fixture
def mesh():
    return build_mesh(ParallelConfig())


@pytest.fixture
def directory(model_directory):
    return model_directory("Qwen3", tied=False)


def batch(step: int) -> SftBatch:
    token_ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(step))
    return SftBatch(
        token_ids=token_ids,
        trainable=torch.ones_like(token_ids, dtype=torch.bool),
        position_ids=None,
        num_tokens=18,
    )


def is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens.", "model.layers.0."))


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model_tensors(model).items()}


def test_what_matches_stays_and_the_rest_moves_also_past_a_checkpoint(directory, mesh, tmp_path):
    model = load_causal_lm(directory, mesh, ModelConfig(freeze=FREEZE))
    before = copies(model)
    learner = Learner(model, LEARNING, mesh=mesh)
    learner.step([batch(0)], sft_loss)
    store = CheckpointStore(tmp_path, mesh)
    store.save(1, learner)
    expected = learner.step([batch(1)], sft_loss)
    after = copies(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value) is is_frozen(name), name
    again = Learner(
        load_causal_lm(directory, mesh, ModelConfig(freeze=FREEZE)), LEARNING, mesh=mesh
    )
    store.load(again)
    assert again.step([batch(1)], sft_loss).grad_norm == expected.grad_norm
    assert all(torch.equal(value, after[name]) for name, value in copies(again.model).items())


def test_the_gradients_of_the_rest_are_those_without_freezing(directory, mesh):
    part, whole = (
        load_causal_lm(directory, mesh, ModelConfig(freeze=freeze)) for freeze in (FREEZE, ())
    )
    for model in (part, whole):
        sft_loss(model, batch(0)).total.backward()
    theirs = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        if is_frozen(name):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, theirs[name].grad)


def test_layers_that_are_frozen_have_no_adapter(directory, mesh):
    pytest.importorskip("peft")
    config = ModelConfig(lora=LoraConfig(rank=2), freeze=FREEZE)
    model = load_causal_lm(directory, mesh, config)
    adapted = [name for name, value in model.named_parameters() if value.requires_grad]
    assert len(adapted) == 7 * 2
    assert all(name.startswith("model.layers.1.") for name in adapted)


def test_a_pattern_without_a_match_is_refused_with_names_near_it(directory, mesh):
    with pytest.raises(FreezeError, match=r"'layers.0.\*' \(there is model\.layers\.0\."):
        load_causal_lm(directory, mesh, ModelConfig(freeze=("layers.0.*",)))
    model = load_causal_lm(directory, mesh, ModelConfig(freeze=("*",)))
    with pytest.raises(OptimizerError, match="nothing to train"):
        Learner(model, LEARNING, mesh=mesh)


def test_frozen_parts_are_those_of_transformers_names(directory):
    config, frozen = read_config(directory), ModelConfig(freeze=FREEZE)
    assert chosen_implementation(config, ModelConfig(), ParallelConfig(tp=2)) == "native"
    for axis in ("tp", "pp"):
        parallel = ParallelConfig(**{axis: 2})
        assert chosen_implementation(config, frozen, parallel) == "transformers"
    mixture = transformers.Qwen3MoeConfig()
    with pytest.raises(MeshError, match="frozen parts ask for it"):
        check_trainable(mixture, frozen, ParallelConfig(ep=2), 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora": LoraConfig()}, "no lora"),
        (
            {"low_precision": LowPrecisionConfig(), "freeze": FREEZE},
            "no low_precision and no freeze",
        ),
    ],
)
def test_torchtitans_modules_are_not_exchanged_unasked_for_what_they_have_not(changes, named):
    with pytest.raises(ValueError, match=rf"implementation is 'native', which has {named}:"):
        ModelConfig(implementation="native", **changes)
    assert ModelConfig(**changes).wanted_implementation == "transformers"
