"""What the gradient of each KL estimator is, by summing over a whole categorical distribution.

For x ~ μ and a loss l(x; θ), E∇l = Σ_x μ(x) ∇l(x): a sum of five terms in float64, no sampling.
"""

import pytest
import torch

from cosmos_algos import KlConfig, k3, kl_loss


def distributions():
    generator = torch.Generator().manual_seed(5)
    theta = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    others = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    return theta, others[0], others[1]


def gradient(value, theta):
    return torch.autograd.grad(value, theta)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("on_policy", [True, False], ids=["from_pi", "from_mu"])
def test_the_expected_gradient_is_that_of_the_reverse_divergence(estimator, on_policy):
    theta, reference, behaviour = distributions()
    logp = theta.log_softmax(-1)
    sampler = logp.detach() if on_policy else behaviour
    exact = gradient((logp.exp() * (logp - reference)).sum(), theta)

    logp = theta.log_softmax(-1)
    losses = kl_loss(
        logp[None], reference[None], (logp - sampler).exp()[None], KlConfig(estimator=estimator)
    )
    expected = gradient((sampler.exp() * losses[0]).sum(), theta)

    torch.testing.assert_close(expected, exact, atol=1e-14, rtol=0)


def test_k3_as_a_plain_loss_has_the_gradient_of_the_forward_divergence():
    theta, reference, _ = distributions()
    logp = theta.log_softmax(-1)
    forward = gradient((reference.exp() * (reference - logp)).sum(), theta)

    logp = theta.log_softmax(-1)
    plain = gradient((logp.detach().exp() * k3(logp - reference)).sum(), theta)

    torch.testing.assert_close(plain, forward, atol=1e-14, rtol=0)


def test_k1_as_a_plain_loss_has_no_gradient():
    theta, reference, _ = distributions()
    logp = theta.log_softmax(-1)

    plain = gradient((logp.detach().exp() * (logp - reference)).sum(), theta)

    torch.testing.assert_close(plain, torch.zeros_like(plain), atol=1e-15, rtol=0)


def test_k3_as_a_value_is_the_divergence():
    theta, reference, _ = distributions()
    logp = theta.detach().log_softmax(-1)

    value = (logp.exp() * k3(logp - reference)).sum()

    torch.testing.assert_close(value, (logp.exp() * (logp - reference)).sum())
