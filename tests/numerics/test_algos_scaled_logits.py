"""Models that change logits behind their head, scored in chunks, against their own logits."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from recorded_shapes import RecordedShapes
from tiny_models import tiny_config, tiny_muse
from torchtitan.models.muse_glimmer.model import SoftCappedLinear

from cosmos_algos import (
    LogitScaling,
    ModelHeadError,
    OutputHead,
    candidate_logprobs,
    chunked_logprobs,
    empty_batch,
    model_scores,
    scores_from_logits,
)
from cosmos_algos.scoring import scores_and_candidates, scores_and_likeliest

ROWS, COLUMNS, CHUNK = 3, 40, 7
VOCABULARY = 131  # as wide as nothing else

# By model_type; each has a factor that its usual one is not, or a cap that bends.
SETTINGS = {
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.3},
    "cohere2_moe": {"logit_scale": 0.3},
    "falcon_h1": {"lm_head_multiplier": 0.4},
    "gemma2": {"final_logit_softcapping": 1.0},
    "gemma3_text": {"final_logit_softcapping": 0.8},
    "gemma3n_text": {"final_logit_softcapping": 0.8},
    "gemma4_text": {"final_logit_softcapping": 0.8},
    "granite": {"logits_scaling": 4.0},
    "granite_swa": {"logits_scaling": 0.5},
    "granitemoe": {"logits_scaling": 0.5},
    "granitemoe_swa": {"logits_scaling": 0.5},
    "granitemoehybrid": {"logits_scaling": 0.5},
    "granitemoeshared": {"logits_scaling": 0.5},
    "hyperclovax": {"logits_scaling": 0.5},
    "minicpm3": {"dim_model_base": 64},
    "muse_glimmer": {},
    "nanochat": {"final_logit_softcapping": 0.8},
    "recurrent_gemma": {"logits_soft_cap": 0.8},
    "vaultgemma": {"final_logit_softcapping": 0.8},
}


MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
# Where sizes depend on each other.
CONFIGS = {
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SIZES, **MAMBA, mamba_d_ssm=64, mamba_chunk_size=8
    ),
    "gemma3n_text": lambda: transformers.Gemma3nTextConfig(
        **SIZES,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.0],
    ),
    "gemma4_text": lambda: transformers.Gemma4TextConfig(
        **SIZES,
        head_dim=8,
        global_head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SIZES, **MAMBA, layer_types=["mamba", "attention"], shared_intermediate_size=16
    ),
    "muse_glimmer": tiny_muse,
}


def build(kind: str) -> torch.nn.Module:
    config = CONFIGS[kind]() if kind in CONFIGS else tiny_config(kind)
    config.get_text_config().vocab_size = VOCABULARY
    for name, value in SETTINGS[kind].items():
        setattr(config, name, value)
    maker = "AutoModelForImageTextToText" if kind == "muse_glimmer" else "AutoModelForCausalLM"
    torch.manual_seed(0)
    # kernels of stacked experts have no float64
    model = getattr(transformers, maker).from_config(config, experts_implementation="eager")
    model = model.double().eval()
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, std=0.4, generator=torch.Generator().manual_seed(1))
    return model


def batch_of(model: torch.nn.Module):
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(3, 60, (ROWS, COLUMNS), generator=generator)
    trainable = (torch.arange(COLUMNS) < COLUMNS - 1).expand(ROWS, -1)
    return replace(
        empty_batch(COLUMNS, num_rows=ROWS),
        token_ids=token_ids,
        valid=token_ids > 0,
        targets=token_ids.roll(-1, dims=1),
        trainable=trainable,
    )


def gradients(model: torch.nn.Module, total: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", SETTINGS)
def test_chunks_score_as_the_models_own_logits(kind):
    model = build(kind)
    batch = batch_of(model)
    logits = model(input_ids=batch.token_ids, use_cache=False).logits
    wanted = scores_from_logits(logits, batch.targets, temperature=0.8)
    factors = torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).double()
    factors *= batch.trainable
    theirs = gradients(model, (wanted.logprobs * factors[0] + wanted.entropies * factors[1]).sum())

    with RecordedShapes() as made:
        found = model_scores(model, batch, temperature=0.8, chunk=CHUNK)
        total = (found.logprobs * factors[0] + found.entropies * factors[1]).sum()
        mine = gradients(model, total)

    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other * batch.trainable, atol=1e-10, rtol=0)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, atol=1e-9, rtol=0, msg=name)
    # the weight, once transposed, is the largest that is as wide as the vocabulary
    head = model.get_output_embeddings()
    assert made.most_rows(VOCABULARY) <= max(CHUNK, head.in_features) < ROWS * COLUMNS


@pytest.mark.parametrize("kind", ["cohere", "gemma2", "granite", "muse_glimmer"])
def test_other_tokens_are_scored_as_by_the_models_own_logits(kind):
    model = build(kind)
    batch = batch_of(model)
    with torch.no_grad():
        logits = model(input_ids=batch.token_ids, use_cache=False).logits
    wanted = (logits / 0.8).log_softmax(-1)

    _, top = scores_and_likeliest(model, batch, 3, temperature=0.8, chunk=CHUNK)
    _, others = scores_and_candidates(model, batch, top.token_ids, temperature=0.8, chunk=CHUNK)

    likeliest = wanted.topk(3)
    at = batch.trainable
    assert torch.equal(top.token_ids[at], likeliest.indices[at])
    torch.testing.assert_close(top.logprobs[at], likeliest.values[at], atol=1e-10, rtol=0)
    torch.testing.assert_close(others[at], likeliest.values[at], atol=1e-10, rtol=0)


class Capped(torch.nn.Module):
    """A model of torchtitan's head, which has the factor and the cap within."""

    def __init__(self) -> None:
        super().__init__()
        self.config = tiny_muse()
        self.embed = torch.nn.Embedding(64, 8)
        self.head = SoftCappedLinear.Config(
            in_features=8, out_features=VOCABULARY, output_multiplier=0.7, output_soft_cap_temp=2.0
        ).build()
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(4))

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.head(self.embed(input_ids)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_bounds_its_logits_itself_is_scored_in_chunks(dtype):
    model = Capped().to(dtype)
    batch = batch_of(model)
    wanted = model_scores(model, batch, temperature=0.8, chunk=0)
    theirs = gradients(model, (wanted.logprobs + wanted.entropies).sum())
    with RecordedShapes() as made:
        found = model_scores(model, batch, temperature=0.8, chunk=CHUNK)
        mine = gradients(model, (found.logprobs + found.entropies).sum())
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    for name, gradient in theirs.items():
        allowed = (1e-5 if dtype == torch.float32 else 0.03) * gradient.abs().max().item()
        torch.testing.assert_close(mine[name], gradient, atol=allowed, rtol=0, msg=name)
    assert made.most_rows(VOCABULARY) <= max(CHUNK, 8)


def test_a_setting_of_a_model_that_is_not_known_takes_the_whole_logits():
    # the family multiplies where others divide; of a stranger nobody knows which
    model = build("granite")
    batch = batch_of(model)
    wanted = model_scores(model, batch, chunk=0)
    model.config.model_type = "stranger"
    with RecordedShapes() as made:
        found = model_scores(model, batch, chunk=CHUNK)
    assert torch.equal(found.logprobs, wanted.logprobs)
    assert made.most_rows(VOCABULARY) >= ROWS * (COLUMNS - 1)


def test_a_model_that_does_something_else_is_refused_with_a_way_out():
    model = build("granite")
    model.config.model_type = "hyperclovax"
    with pytest.raises(ModelHeadError, match="set the log-prob chunk to 0"):
        model_scores(model, batch_of(model), chunk=CHUNK)


@pytest.mark.parametrize("scaling", [LogitScaling(multiplier=0.3), LogitScaling(cap=1.5)], ids=str)
def test_no_tensor_has_a_row_of_logits_for_each_target(scaling):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 4, generator=generator).requires_grad_() for n in (40, 9))
    targets = torch.arange(40) % 9
    head = OutputHead(weight, scaling=scaling)
    with RecordedShapes() as made:
        scores = chunked_logprobs(hidden, head, targets, chunk=6)
        others = candidate_logprobs(hidden, head, targets[:, None], chunk=6)
        (scores.logprobs + scores.entropies + others[:, 0]).sum().backward()
    assert made.most_rows(9) == 6
    with RecordedShapes() as whole:
        head.logits(hidden)
    assert whole.most_rows(9) == 40
