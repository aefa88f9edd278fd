"""Attention of torchtitan's models within samples of packed rows, against a mask of the square."""

from collections.abc import Callable

import pytest
import torch
from recorded_shapes import RecordedShapes
from torch import Tensor
from torch.nn import functional

from cosmos_parallel.native.attention import ExactAttention
from cosmos_parallel.native.gpt_oss import SinkAttention
from cosmos_parallel.native.varlen import attend_by_kernel, runs_kernel
from cosmos_parallel.sample_blocks import packed_rows
from cosmos_parallel.sequences import Visibility

LENGTHS = ((5, 1, 40, 15), (3, 2, 17, 39))  # of two rows of 61 tokens
LENGTH = 61
SINKS = torch.linspace(-1, 1, 4, dtype=torch.float64)
SCALE = 0.3


def positions() -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def square(window: int | None) -> Tensor:
    """Return what each token of the rows sees: bool [2, 1, 61, 61]."""
    seen = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            for query in range(start, start + length):
                first = start if window is None else max(start, query + 1 - window)
                seen[row, 0, query, first : query + 1] = True
            start += length
    return seen


def inputs(value_width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries of four heads, and keys and values of two: [2, 61, heads, width]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, value_width))
    parts = [torch.randn(2, LENGTH, *each, generator=generator, dtype=dtype) for each in shapes]
    return [part.requires_grad_() for part in parts]


def after_sinks(out: Tensor, sums: Tensor) -> Tensor:
    """Give each head's sink its part: [B, L, N, H] and the log of sums [B, L, N]."""
    return out * torch.sigmoid(sums - SINKS)[..., None]


def run_exact(window: int | None, parts: list[Tensor], sight: Visibility) -> Tensor:
    attention = ExactAttention(ExactAttention.Config(window=window))
    return attention(*parts, attention_masks=sight, scale=SCALE, enable_gqa=True)


def run_sinks(window: int | None, parts: list[Tensor], sight: Visibility) -> Tensor:
    attention = SinkAttention(SinkAttention.Config(window=window))
    return attention(
        *parts, attention_masks=sight, scale=SCALE, enable_gqa=True, out_transform=after_sinks
    )


def dense_exact(parts: list[Tensor], mask: Tensor) -> Tensor:
    rows = [part.transpose(1, 2) for part in parts]
    out = functional.scaled_dot_product_attention(
        *rows, attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    return out.transpose(1, 2)


def dense_sinks(parts: list[Tensor], mask: Tensor) -> Tensor:
    query, *others = (part.transpose(1, 2) for part in parts)
    key, value = (part.repeat_interleave(2, dim=1) for part in others)
    scores = (query @ key.transpose(2, 3) * SCALE).masked_fill(~mask, -torch.inf)
    sinks = SINKS.view(1, 4, 1, 1).expand(2, 4, LENGTH, 1)
    weights = torch.cat([scores, sinks], dim=3).softmax(dim=3)[..., :-1]
    return (weights @ value).transpose(1, 2)


def with_gradients(parts: list[Tensor], attend: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """Return an output and the gradient of each part, with no two places weighed alike."""
    out = attend(parts)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out)).sum(), parts)]


@pytest.mark.parametrize(
    ("run", "dense", "window", "value_width"),
    [
        (run_exact, dense_exact, None, 8),
        (run_exact, dense_exact, 4, 8),
        (run_exact, dense_exact, 20, 8),  # as long as some samples, and longer than others
        (run_exact, dense_exact, None, 12),  # latent attention
        (run_sinks, dense_sinks, None, 8),
        (run_sinks, dense_sinks, 4, 8),
    ],
)
def test_samples_by_themselves_are_what_a_mask_of_the_square_leaves(
    run, dense, window, value_width
):
    parts = inputs(value_width)
    with RecordedShapes() as recorded:
        sight = Visibility.of(positions(), None)
        found = with_gradients(parts, lambda parts: run(window, parts, sight))
    expected = with_gradients(parts, lambda parts: dense(parts, square(window)))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert not any(shape[-2:] == (LENGTH, LENGTH) for shape in recorded.shapes)
    # four heads' scores of the two longest samples are the most that there is at once
    assert max(torch.Size(shape).numel() for shape in recorded.shapes) <= 4 * 2 * 40 * 40


def test_rows_of_one_sample_have_neither_blocks_nor_a_mask():
    sight = Visibility.of(torch.arange(LENGTH).expand(2, -1), None)
    assert sight.packed is None
    assert sight.mask is None


def test_a_row_that_begins_in_the_middle_of_a_sample_may_hold_another():
    sight = Visibility.of(torch.tensor([[3, 4, 0, 1]]), None)
    assert sight.packed is not None
    assert sight.packed.offsets.tolist() == [0, 2, 4]


def test_offsets_go_on_from_row_to_row():
    packed = packed_rows(positions() == 0)
    assert packed.offsets.tolist() == [0, 5, 6, 46, 61, 64, 66, 83, 122]
    assert packed.longest == 40


@pytest.mark.parametrize("window", [None, 4])
def test_a_kernel_for_samples_of_any_length_is_called_as_torch_has_it(window):
    """On tensors without data, for which torch has the kernel's checks and shapes alone."""
    parts = [part.detach().bfloat16().to("meta").requires_grad_() for part in inputs(8)]
    packed = packed_rows(positions() == 0)
    out = attend_by_kernel(*parts, packed, scale=None, window=window)
    assert out.shape == (2, LENGTH, 4, 8)
    out.sum().backward()
    assert all(part.grad.shape == part.shape for part in parts)
    assert not runs_kernel(parts[0], parts[2])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
def test_a_kernel_for_samples_of_any_length_gives_what_blocks_do(window):
    exact = inputs(8)
    rounded = [part.detach().bfloat16().cuda().requires_grad_() for part in exact]
    sight = Visibility.of(positions().cuda(), None)
    assert runs_kernel(rounded[0], rounded[2])
    found = with_gradients(rounded, lambda parts: run_exact(window, parts, sight))
    expected = with_gradients(exact, lambda parts: dense_exact(parts, square(window)))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=0.05, atol=0.05)
