"""Cross-entropy in one pass, against torch's in float64."""

import pytest
import torch
from torch import nn

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
