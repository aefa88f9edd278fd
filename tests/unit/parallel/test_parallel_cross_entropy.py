"""Cross-entropy in one pass, against torch's in float64."""

from importlib.util import find_spec

import pytest
import torch
from capabilities import needs
from torch import nn
from triton_interpreter import check_interpreted

from cosmos_parallel.cross_entropy import summed_cross_entropy

TOKENS, WORDS = 2500, 37  # three chunks, the last not whole


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(TOKENS, WORDS, generator=chance)).to(dtype).requires_grad_()
    targets = torch.randint(0, WORDS, (TOKENS,), generator=chance)
    return logits, targets, torch.rand(TOKENS, generator=chance) < 0.7


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01), (torch.float16, 0.01)]
)
def test_the_sum_and_its_gradient_are_those_of_double_precision(dtype, within):
    logits, targets, mask = drawn(dtype)
    total, num_correct = summed_cross_entropy(logits, targets, mask)
    (0.37 * total).backward()
    exact = logits.detach().double().requires_grad_()
    losses = nn.functional.cross_entropy(exact, targets, reduction="none")
    (0.37 * losses[mask].sum()).backward()
    assert total.item() == pytest.approx(losses[mask].sum().item(), rel=1e-6)
    assert num_correct.item() == int((exact.argmax(-1) == targets)[mask].sum())
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=within, atol=1e-7)
    assert not logits.grad[~mask].any()


@pytest.mark.parametrize("padding", [float("nan"), float("inf")])
def test_what_stands_at_tokens_that_do_not_count_is_of_no_account(padding):
    logits, targets, mask = drawn(torch.float32)
    (wanted,) = torch.autograd.grad(summed_cross_entropy(logits, targets, mask)[0], logits)
    spoilt = logits.detach().masked_fill(~mask[:, None], padding).requires_grad_()
    total, _ = summed_cross_entropy(spoilt, targets, mask)
    total.backward()
    assert total.item() == summed_cross_entropy(logits, targets, mask)[0].item()
    assert torch.equal(spoilt.grad, wanted)


def test_a_factor_of_the_loss_is_not_rounded_to_the_dtype_of_logits():
    """0.3696 is 0.3691 in bfloat16: all gradients together would be off by a thousandth."""
    logits, targets, mask = drawn(torch.bfloat16)
    total, _ = summed_cross_entropy(logits, targets, mask)
    (plain,) = torch.autograd.grad(total, logits, retain_graph=True)
    (scaled,) = torch.autograd.grad(0.3696 * total, logits)
    assert torch.equal(scaled, (plain.float() * 0.3696).bfloat16())


def test_without_gradients_none_are_made():
    logits, targets, mask = drawn(torch.float32)
    with torch.no_grad():
        total, _ = summed_cross_entropy(logits, targets, mask)
    assert not total.requires_grad
    assert total.item() == summed_cross_entropy(logits, targets, mask)[0].item()
    nothing = torch.zeros_like(mask)
    total, _ = summed_cross_entropy(logits, targets, nothing)
    total.backward()
    assert total.item() == 0.0
    assert not logits.grad.any()


# Each program of a GPU's kernels is a row; an interpreter runs one after the other.
INTERPRETED = """
import torch
from torch import nn
from cosmos_parallel.cross_entropy_kernel import row_slopes, row_sums
chance = torch.Generator().manual_seed(3)
for tokens, words, within in [(7, 5000, 1e-6), (5, 9001, 0.01), (3, 50, 1e-6)]:
    logits = 4 * torch.randn(tokens, words, generator=chance)
    logits[0] = 0.5
    logits = logits.bfloat16() if within == 0.01 else logits
    targets = torch.randint(0, words, (tokens,), generator=chance)
    targets[:2] = torch.tensor([0, int(logits[1].argmax())])
    mask = torch.arange(tokens) != 2
    exact = logits.double().requires_grad_()
    losses = nn.functional.cross_entropy(exact, targets, reduction="none")
    (0.37 * losses[mask].sum()).backward()
    normalisers, logprobs, hits = row_sums(logits, targets)
    torch.testing.assert_close(-logprobs.double(), losses.detach(), rtol=1e-6, atol=1e-6)
    assert hits.tolist() == (exact.argmax(-1) == targets).int().tolist()
    slopes = row_slopes(logits, targets, mask, normalisers, torch.tensor([0.37]))
    assert slopes.dtype == logits.dtype
    torch.testing.assert_close(slopes.double(), exact.grad, rtol=within, atol=1e-7)
for bad in (float("nan"), float("inf")):
    logits[1, 7] = bad
    assert row_sums(logits, targets)[1].isnan().tolist() == [False, True, False]
logits[1, 7] = -float("inf")
assert row_sums(logits, targets)[1].isfinite().all()
"""


@needs("triton", find_spec("triton") is not None)
def test_the_kernels_of_a_gpu_compute_the_same():
    check_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("words", [37, 128_256])
def test_on_a_gpu_too_they_are_those_of_double_precision(dtype, within, words):
    """A processor's float32 would not do: adding up 128 thousand terms it is off by 4e-5.

    Gradients are 0.37 of what is left of a probability, whose exponent of up to 16 is off by 1e-6.
    """
    chance = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(300, words, generator=chance)).to(dtype)
    targets = torch.randint(0, words, (300,), generator=chance)
    targets[:100] = logits[:100].argmax(-1)
    mask = torch.rand(300, generator=chance) < 0.7
    exact, there = logits.double().requires_grad_(), logits.cuda().requires_grad_()
    losses = nn.functional.cross_entropy(exact, targets, reduction="none")
    (0.37 * losses[mask].sum()).backward()
    found, num_correct = summed_cross_entropy(there, targets.cuda(), mask.cuda())
    (0.37 * found).backward()
    assert found.item() == pytest.approx(losses[mask].sum().item(), rel=1e-6)
    assert num_correct.item() == int((exact.argmax(-1) == targets)[mask].sum())
    torch.testing.assert_close(there.grad.cpu().double(), exact.grad, rtol=within, atol=4e-7)
    assert not there.grad[~mask.cuda()].any()
