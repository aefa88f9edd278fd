"""Cross-entropy of logits over a large vocabulary, in one pass over them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _triton

_CHUNK_TOKENS = 1024


def summed_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masked sum over N tokens, in nats with gradient, and how many were the likeliest.

    On a GPU one kernel reads the logits for the loss, and one for its gradient. Elsewhere some rows
    at a time are turned to float32, and their gradient is made beside their loss, in the dtype of
    the logits: what the forward pass reads is not read again for the backward one.

    Args:
        logits: floating [N, V].
        targets: int64[N], in 0 to V - 1.
        mask: bool[N], the tokens that count.
    """
    is_plain = type(logits) is Tensor and logits.stride(-1) == 1
    by_kernel = logits.is_cuda and is_plain and _triton.has_triton()
    function = _CrossEntropyByKernel if by_kernel else _SummedCrossEntropy
    total, num_correct = function.apply(logits, targets.contiguous(), mask.contiguous())  # pyright: ignore
    return total, num_correct


class _CrossEntropyByKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        from cosmos_parallel.cross_entropy_kernel import row_sums

        normalisers, logprobs, hits = row_sums(logits, targets)
        num_correct = (hits * mask).sum()
        ctx.save_for_backward(logits, targets, mask, normalisers)
        ctx.mark_non_differentiable(num_correct)
        return -torch.where(mask, logprobs, 0.0).sum(), num_correct

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        from cosmos_parallel.cross_entropy_kernel import row_slopes

        logits, targets, mask, normalisers = ctx.saved_tensors
        factor = grad_outputs[0].reshape(1)
        return row_slopes(logits, targets, mask, normalisers, factor), None, None


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        total = logits.new_zeros((), dtype=torch.float32)
        num_correct = torch.zeros((), dtype=torch.int64, device=logits.device)
        needs_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if needs_gradient else logits.new_empty(0)
        for first in range(0, len(logits), _CHUNK_TOKENS):
            rows = slice(first, first + _CHUNK_TOKENS)
            part, goals, kept = logits[rows], targets[rows], mask[rows]
            logprobs = torch.log_softmax(part, dim=-1, dtype=torch.float32)
            own = logprobs.gather(1, goals[:, None])[:, 0]
            total -= torch.where(kept, own, 0.0).sum()
            num_correct += ((part.argmax(dim=-1) == goals) & kept).sum()
            if needs_gradient:
                # of -log softmax: the probabilities, less 1 at the target
                slopes = logprobs.exp_()
                slopes[torch.arange(len(goals), device=goals.device), goals] -= 1.0
                gradient[rows] = slopes.masked_fill_(~kept[:, None], 0.0)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(num_correct)
        return total, num_correct

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        # of one dim, so that it is no number that would be rounded to bfloat16 first
        factor = grad_outputs[0].reshape(1)
        return torch.mul(gradient, factor, out=torch.empty_like(gradient)), None, None
