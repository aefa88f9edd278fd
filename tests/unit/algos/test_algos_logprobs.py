"""Chunked log-probabilities against plain log-softmax."""

import pytest
import torch

from cosmos_algos import (
    AlgorithmConfigError,
    candidate_logprobs,
    chunked_logprobs,
    scores_from_logits,
)


def inputs(dtype, rows=(2, 5), hidden=4, vocabulary=7):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(*rows, hidden, generator=generator, dtype=dtype).requires_grad_(),
        torch.randn(vocabulary, hidden, generator=generator, dtype=dtype).requires_grad_(),
        torch.randn(vocabulary, generator=generator, dtype=dtype).requires_grad_(),
        torch.randint(vocabulary, rows, generator=generator),
    )


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_values_and_gradients_equal_those_of_whole_logits(chunk, temperature, dtype, tolerance):
    hidden, weight, bias, targets = inputs(dtype)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    whole = scores_from_logits(logits, targets, temperature=temperature)
    chunked = chunked_logprobs(
        hidden, weight, targets, bias=bias, temperature=temperature, chunk=chunk
    )

    factors = torch.randn(2, *targets.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    gradients = [
        torch.autograd.grad(
            (s.logprobs * factors[0] + s.entropies * factors[1]).sum(), [hidden, weight, bias]
        )
        for s in (whole, chunked)
    ]
    for expected, found in zip([*whole, *gradients[0]], [*chunked, *gradients[1]], strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_gradients_equal_finite_differences():
    hidden, weight, bias, targets = inputs(torch.float64, rows=(3,))

    assert torch.autograd.gradcheck(
        lambda h, w, b: tuple(chunked_logprobs(h, w, targets, bias=b, temperature=1.3, chunk=2)),
        (hidden, weight, bias),
    )


def test_probabilities_and_entropy_by_hand():
    # Logits 0 and log 3: probabilities 1/4 and 3/4, entropy log 4 - 3/4 log 3.
    scores = chunked_logprobs(
        torch.tensor([[1.0]]),
        torch.tensor([[0.0], [torch.log(torch.tensor(3.0))]]),
        torch.tensor([1]),
    )

    torch.testing.assert_close(scores.logprobs, torch.tensor([0.75]).log())
    torch.testing.assert_close(scores.entropies, torch.tensor([0.5623351]))


@pytest.mark.parametrize("of_entropies", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [0, 2])
def test_tokens_that_are_masked_out_have_no_part_in_entropies_and_gradients(chunk, of_entropies):
    # -inf where nothing may be drawn, as at padding of the vocabulary: 0 log 0 is 0
    hidden, weight, bias, targets = inputs(torch.float64)
    masked = bias.detach().masked_fill(torch.arange(7) >= 5, -torch.inf).requires_grad_()

    def score(weight, bias, chunk):
        if chunk:
            return chunked_logprobs(hidden, weight, targets % 5, bias=bias, chunk=chunk)
        return scores_from_logits(torch.nn.functional.linear(hidden, weight, bias), targets % 5)

    found, wanted = score(weight, masked, chunk), score(weight[:5], bias[:5], 0)
    # stacked, as a model's output is: entropies that a loss does not read have a gradient of 0
    factors = torch.tensor([1.0, of_entropies], dtype=torch.float64)
    gradients = [
        torch.autograd.grad((torch.stack(scores, dim=-1) * factors).sum(), [hidden, weight, last])
        for scores, last in ((found, masked), (wanted, bias))
    ]
    for one, other in zip([*found, *gradients[0]], [*wanted, *gradients[1]], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_bfloat16_inputs_give_float32_scores_and_bfloat16_gradients():
    hidden, weight, _, targets = inputs(torch.bfloat16)
    scores = chunked_logprobs(hidden, weight, targets)
    scores.logprobs.sum().backward()

    exact = scores_from_logits(hidden.double() @ weight.double().T, targets)
    assert scores.logprobs.dtype == torch.float32
    assert weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    # Logits are rounded to bfloat16 by the projection itself: 2^-8 relative.
    torch.testing.assert_close(scores.logprobs.double(), exact.logprobs, atol=0.05, rtol=0)


def test_no_rows_still_have_a_gradient():
    _, weight, _, _ = inputs(torch.float32)
    hidden = torch.zeros(0, 4, requires_grad=True)

    scores = chunked_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long))
    scores.logprobs.sum().backward()

    assert weight.grad.eq(0).all()
    assert hidden.grad.shape == (0, 4)


@pytest.mark.parametrize("chunk", [0, -4])
def test_no_rows_at_a_time_are_refused(chunk):
    hidden, weight, _, targets = inputs(torch.float32)
    with pytest.raises(AlgorithmConfigError, match=f"chunk is {chunk}; it must be 1 or more"):
        chunked_logprobs(hidden, weight, targets, chunk=chunk)
    with pytest.raises(AlgorithmConfigError, match=f"chunk is {chunk}; it must be 1 or more"):
        candidate_logprobs(hidden[0], weight, targets[0][:, None], chunk=chunk)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, bias, targets = inputs(torch.float32)
    frozen = weight.detach()

    chunked_logprobs(hidden, frozen, targets, bias=bias.detach()).logprobs.sum().backward()

    assert hidden.grad.abs().sum() > 0
    assert frozen.grad is None
