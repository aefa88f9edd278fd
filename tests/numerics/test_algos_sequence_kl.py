"""KL in the reward against KL in the loss, by enumerating all sequences of two tokens.

Three tokens, two steps, the second distribution depends on the first token: nine sequences, each
weighed by its probability, in float64. What is compared are gradients of expectations.
"""

from dataclasses import replace

import pytest
import torch

from cosmos_algos import (
    KlConfig,
    NoCorrection,
    ObjectiveConfig,
    TokenScores,
    empty_batch,
    policy_objective,
)

VOCABULARY = 3
SEQUENCES = [(a, b) for a in range(VOCABULARY) for b in range(VOCABULARY)]


def tables():
    """Logits of the first token, and of the second after each first: [1 + V, V]."""
    generator = torch.Generator().manual_seed(11)
    theta = torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64)
    reference = torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64)
    return theta.requires_grad_(), reference.log_softmax(-1)


def token_logprobs(logp):
    """[9, 2]: log-probability of both tokens of every sequence."""
    return torch.stack([torch.stack([logp[0, a], logp[1 + a, b]]) for a, b in SEQUENCES])


def expected_gradient(theta, reference, kl):
    """Gradient of the objective's expectation over the policy's own samples."""
    logprobs = token_logprobs(theta.log_softmax(-1))
    probabilities = logprobs.detach().sum(-1).exp()
    batch = replace(
        empty_batch(num_rows=len(SEQUENCES)),
        trainable=torch.ones(9, 2, dtype=torch.bool),
        behaviour_logprobs=logprobs.detach(),
        reference_logprobs=token_logprobs(reference),
        advantages=torch.zeros(9, 2, dtype=torch.float64),
        token_weights=probabilities[:, None].expand(9, 2),
        denominators=torch.ones(9, dtype=torch.float64),
    )
    objective = ObjectiveConfig(correction=NoCorrection(), kl=kl)
    part = policy_objective(TokenScores(logprobs, torch.zeros_like(logprobs)), batch, objective)
    return torch.autograd.grad(part.total, theta)[0]


def sequence_divergence(theta, reference):
    logprobs = token_logprobs(theta.log_softmax(-1)).sum(-1)
    return (logprobs.exp() * (logprobs - token_logprobs(reference).sum(-1))).sum()


def token_divergence(theta, reference):
    """Σ_t KL of each token's distribution, at states that are held where they are."""
    logp = theta.log_softmax(-1)
    each = (logp.exp() * (logp - reference)).sum(-1)
    return each[0] + (logp[0].detach().exp() * each[1:]).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_in_the_reward_the_gradient_is_that_of_the_divergence_of_sequences(estimator):
    theta, reference = tables()
    exact = torch.autograd.grad(sequence_divergence(theta, reference), theta)[0]

    found = expected_gradient(
        theta, reference, KlConfig(coefficient=1.0, estimator=estimator, place="reward")
    )

    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_in_the_loss_the_gradient_is_that_of_each_tokens_divergence(estimator):
    theta, reference = tables()
    exact = torch.autograd.grad(token_divergence(theta, reference), theta)[0]

    found = expected_gradient(theta, reference, KlConfig(coefficient=1.0, estimator=estimator))

    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-13)
    whole = torch.autograd.grad(sequence_divergence(theta, reference), theta)[0]
    assert (found - whole).abs().max() > 0.01  # the two divergences are not the same thing


def test_distillation_has_the_gradient_of_each_tokens_reverse_divergence():
    theta, teacher = tables()
    logprobs = token_logprobs(theta.log_softmax(-1))
    probabilities = logprobs.detach().sum(-1).exp()
    batch = replace(
        empty_batch(num_rows=len(SEQUENCES)),
        trainable=torch.ones(9, 2, dtype=torch.bool),
        behaviour_logprobs=logprobs.detach(),
        teacher_logprobs=token_logprobs(teacher),
        advantages=torch.zeros(9, 2, dtype=torch.float64),
        token_weights=probabilities[:, None].expand(9, 2),
        denominators=torch.ones(9, dtype=torch.float64),
    )
    objective = ObjectiveConfig(correction=NoCorrection(), teacher_coefficient=1.0)
    part = policy_objective(TokenScores(logprobs, torch.zeros_like(logprobs)), batch, objective)

    found = torch.autograd.grad(part.total, theta)[0]

    exact = torch.autograd.grad(token_divergence(theta, teacher), theta)[0]
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-13)
