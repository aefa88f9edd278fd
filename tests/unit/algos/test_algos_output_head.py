"""Heads that multiply or bound their logits, in chunks, against float64 loops over tokens."""

import math

import pytest
import torch
from torch import Tensor

from cosmos_algos import (
    AlgorithmConfigError,
    LogitScaling,
    OutputHead,
    ShapeError,
    candidate_logprobs,
    chunked_logprobs,
)

WIDTH, VOCABULARY = 4, 7
SCALINGS = [
    LogitScaling(multiplier=0.3),
    LogitScaling(multiplier=-2.0),
    LogitScaling(cap=1.5),
    LogitScaling(multiplier=0.7, cap=2.0),
    LogitScaling(multiplier=5.0, cap=0.5),
]


def inputs(dtype=torch.float64, rows=(2, 5)):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*rows, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, rows, generator=generator)
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), targets


def logprobs_of(state: Tensor, head: OutputHead, temperature: float) -> Tensor:
    """Return log-probabilities of all tokens, each logit by the formula."""
    logits = []
    for token, row in enumerate(head.weight):
        product = (state * row).sum() + (0.0 if head.bias is None else head.bias[token])
        cap, multiplier = head.scaling.cap, head.scaling.multiplier
        if cap is None:
            logits.append(multiplier * product / temperature)
        else:
            logits.append(cap * torch.tanh(multiplier * product / cap) / temperature)
    logits = torch.stack(logits)
    return logits - logits.exp().sum().log()


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_values_and_gradients_are_those_of_the_formula(scaling, temperature, chunk):
    hidden, weight, bias, targets = inputs()
    head = OutputHead(weight, bias, scaling)
    rows = [logprobs_of(state, head, temperature) for state in hidden.flatten(0, 1)]
    wanted = (
        torch.stack([row[y] for row, y in zip(rows, targets.flatten(), strict=True)]).view(2, 5),
        torch.stack([-(row.exp() * row).sum() for row in rows]).view(2, 5),
    )
    found = chunked_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)

    factors = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(2)).double()
    for several in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        gradients = [
            torch.autograd.grad(
                sum(s * f * x for s, f, x in zip(several, factors, part, strict=True)).sum(),
                [hidden, weight, bias],
                retain_graph=True,
            )
            for part in (wanted, found)
        ]
        torch.testing.assert_close(gradients[1], gradients[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(tuple(found), wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_gradients_equal_finite_differences(scaling):
    hidden, weight, bias, targets = inputs(rows=(3,))

    assert torch.autograd.gradcheck(
        lambda h, w, b: tuple(
            chunked_logprobs(h, OutputHead(w, b, scaling), targets, temperature=1.3, chunk=2)
        ),
        (hidden, weight, bias),
    )


def test_probabilities_by_hand():
    # Products 0 and log 3; bounded by 2 the second logit is 2 tanh(log(3) / 2) = 1, over 0.5: 2.
    head = OutputHead(torch.tensor([[0.0], [math.log(3.0)]]), scaling=LogitScaling(cap=2.0))
    scores = chunked_logprobs(torch.tensor([[1.0]]), head, torch.tensor([1]), temperature=0.5)
    torch.testing.assert_close(scores.logprobs, torch.tensor([1.0 / (1.0 + math.exp(-2.0))]).log())


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_other_tokens_are_scored_by_the_formula(scaling, chunk):
    hidden, weight, bias, _ = inputs(rows=(5,))
    head = OutputHead(weight, bias, scaling)
    wanted = torch.stack([logprobs_of(state, head, 0.7) for state in hidden])
    ids = torch.tensor([[6, 0], [3, 3], [1, 2], [5, 4], [0, 1]])

    found = candidate_logprobs(hidden, head, ids, temperature=0.7, chunk=chunk)

    torch.testing.assert_close(found, wanted.gather(1, ids), atol=1e-12, rtol=1e-12)
    gradients = [
        torch.autograd.grad(x.sum(), [hidden, weight, bias]) for x in (wanted.gather(1, ids), found)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-12, rtol=1e-12)


def test_a_saturated_cap_gives_no_gradient_and_no_nan():
    hidden, weight, _, targets = inputs(torch.float32)
    head = OutputHead(weight, scaling=LogitScaling(multiplier=1e6, cap=3.0))
    scores = chunked_logprobs(hidden, head, targets)
    (scores.logprobs + scores.entropies).sum().backward()
    assert scores.logprobs.isfinite().all()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def as_transformers(products: Tensor, scaling: LogitScaling) -> Tensor:
    """Return logits as Gemma 2 and Cohere compute them, each operation rounded to its type."""
    logits = products * scaling.multiplier
    if scaling.cap is not None:
        logits = logits / scaling.cap
        logits = torch.tanh(logits)
        logits = logits * scaling.cap
    return logits.float()


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_bfloat16_is_rounded_as_in_transformers(scaling):
    hidden, weight, _, targets = inputs(torch.bfloat16)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    scores = chunked_logprobs(hidden, OutputHead(weight, scaling=scaling), targets, chunk=3)
    scores.logprobs.sum().backward()
    wanted = chunked_logprobs(exact_hidden, OutputHead(exact_weight, scaling=scaling), targets)
    wanted.logprobs.sum().backward()

    logits = as_transformers(torch.nn.functional.linear(hidden, weight), scaling)
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(scores.logprobs, logprobs, atol=1e-6, rtol=0)
    for mine, theirs in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert mine.dtype == torch.bfloat16
        largest = theirs.abs().max().item()
        torch.testing.assert_close(mine.double(), theirs, atol=0.03 * largest, rtol=0)


def test_a_head_that_scales_in_float32_does_so_behind_a_bfloat16_projection():
    hidden, weight, _, targets = inputs(torch.bfloat16)
    scaling = LogitScaling(multiplier=0.7, cap=2.0, least=torch.float32)
    head = OutputHead(weight, scaling=scaling)
    scores = chunked_logprobs(hidden, head, targets, chunk=3)
    logits = as_transformers(torch.nn.functional.linear(hidden, weight).float(), scaling)
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(scores.logprobs, logprobs, atol=1e-6, rtol=0)
    assert torch.equal(head.logits(hidden), logits)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_under_autocast_it_is_the_linear_layer_under_autocast(scaling):
    leaves = [inputs(torch.float32) for _ in range(2)]
    (hidden, weight, bias, targets), (plain_hidden, plain_weight, plain_bias, _) = leaves
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chunked_logprobs(hidden, OutputHead(weight, bias, scaling), targets, chunk=3)
        products = torch.nn.functional.linear(plain_hidden, plain_weight, plain_bias)
        logprobs = as_transformers(products, scaling).log_softmax(-1)
        wanted = logprobs.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(found.logprobs, wanted, atol=1e-5, rtol=0)
    found.logprobs.sum().backward()
    wanted.sum().backward()
    for mine, theirs in ((hidden, plain_hidden), (weight, plain_weight), (bias, plain_bias)):
        largest = theirs.grad.abs().max().item()
        torch.testing.assert_close(mine.grad, theirs.grad, atol=0.03 * largest, rtol=0)


def test_what_is_no_head_is_refused():
    hidden, weight, bias, targets = inputs()
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(AlgorithmConfigError, match=f"logit cap is {cap}; .* above 0"):
            LogitScaling(cap=cap)
    with pytest.raises(ShapeError, match="bias beside an OutputHead"):
        chunked_logprobs(hidden, OutputHead(weight), targets, bias=bias)
