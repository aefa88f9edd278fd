"""Scores taken from the head inside a Hugging Face model's forward, against its own logits."""

from dataclasses import replace

import pytest
import torch

from cosmos_algos import (
    GrpoConfig,
    ModelHeadError,
    empty_batch,
    in_one_row,
    model_scores,
    policy_loss,
    scores_from_logits,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def build(family, **settings):
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**(SIZES | special | settings))
    return getattr(transformers, f"{family}ForCausalLM")(config).double().eval()


def ragged_batch():
    """Rows of 7, 4 and 6 tokens, prompts of 2, the rest trained on."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(3, 23, (3, 7), generator=generator)
    lengths = torch.tensor([[7], [4], [6]])
    columns = torch.arange(7)
    valid = columns < lengths
    token_ids = token_ids * valid
    trainable = (columns >= 1) & (columns < lengths - 1)
    return replace(
        empty_batch(),
        token_ids=token_ids,
        valid=valid,
        targets=token_ids.roll(-1, dims=1),
        trainable=trainable,
        behaviour_logprobs=torch.where(trainable, -3.0, 0.0),
        advantages=torch.randn(3, 7, generator=generator) * trainable,
        token_weights=trainable.float(),
        denominators=trainable.sum(1).double(),
        lags=torch.zeros_like(token_ids),
    )


MODELS = [
    ("Qwen3", {"tie_word_embeddings": True}),
    ("Qwen3", {"tie_word_embeddings": False}),
    ("Llama", {}),
    # Biased head.
    ("Phi", {"num_key_value_heads": 2, "head_dim": 8}),
    # These change logits after the head.
    ("Gemma2", {"final_logit_softcapping": 3.0}),
    ("Gemma2", {"final_logit_softcapping": 1.0}),
    ("Cohere", {"logit_scale": 0.5}),
    ("Granite", {"logits_scaling": 4.0}),
]


@pytest.mark.parametrize(("family", "settings"), MODELS, ids=lambda value: str(value))
def test_samples_in_one_row_score_as_each_by_itself(family, settings):
    model = build(family, **settings)
    batch = ragged_batch()
    padded = model_scores(model, batch, chunk=4)
    row = model_scores(model, in_one_row(batch), chunk=4)
    torch.testing.assert_close(row.logprobs[0], padded.logprobs[batch.valid], rtol=0, atol=1e-10)
    torch.testing.assert_close(row.entropies[0], padded.entropies[batch.valid], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("family", "settings"), MODELS, ids=lambda value: str(value))
def test_scores_and_gradients_equal_those_of_the_models_own_logits(family, settings):
    model = build(family, **settings)
    batch = ragged_batch()

    scores = model_scores(model, batch, temperature=0.8, chunk=4)
    scores.logprobs.sum().backward()
    found = [p.grad.clone() for p in model.parameters()]

    model.zero_grad()
    logits = model(input_ids=batch.token_ids, attention_mask=batch.valid.long()).logits
    exact = scores_from_logits(logits, batch.targets, temperature=0.8)
    (exact.logprobs * batch.trainable).sum().backward()

    torch.testing.assert_close(
        scores.logprobs, exact.logprobs * batch.trainable, atol=1e-10, rtol=0
    )
    torch.testing.assert_close(
        scores.entropies, exact.entropies * batch.trainable, atol=1e-10, rtol=0
    )
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-10, rtol=0)


def test_the_whole_logits_are_made_on_request_and_agree():
    model, batch = build("Qwen3"), ragged_batch()

    chunked = model_scores(model, batch, chunk=2)
    whole = model_scores(model, batch, chunk=0)

    torch.testing.assert_close(chunked.logprobs, whole.logprobs, atol=1e-12, rtol=0)


def test_the_model_is_left_without_hooks():
    model = build("Qwen3")

    model_scores(model, ragged_batch())

    assert model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 23)


def test_a_batch_without_trainable_tokens_reaches_every_parameter_with_zeros():
    model = build("Qwen3", tie_word_embeddings=False)

    part = policy_loss(GrpoConfig())(model, empty_batch())
    part.total.backward()

    assert part.weight == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_model_that_changes_scores_behind_its_head_is_refused_with_a_way_out():
    class Scaling(type(build("Qwen3"))):
        def forward(self, input_ids, use_cache):
            output = super().forward(input_ids=input_ids, use_cache=use_cache)
            output.logits = output.logits * 2
            return output

    model = build("Qwen3")
    model.__class__ = Scaling

    with pytest.raises(ModelHeadError, match="set the log-prob chunk to 0"):
        model_scores(model, ragged_batch())
    assert model_scores(model, ragged_batch(), chunk=0).logprobs.shape == (3, 7)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ModelHeadError, match="Linear has no output embeddings"):
        model_scores(torch.nn.Linear(2, 2), ragged_batch())
