"""Layers with a state, where each rank of a group has a stretch of every row.

Stretches are contiguous, so that the state of one rank's last sample is that with which the next
rank's first goes on:

    row     a a a a a b b b | b b b b b b b b | b b c c c c c c     of ranks 0, 1 and 2
    state             B0 ---> M1 B0 + B1 ------> A2 S added to outputs of b, c begins anew

A stretch of a sample makes M S + B of the state S that it is given, and adds A S to its outputs. No
rank needs S for A, M and B: all compute at once, tell each other M and B, and each adds up those
before it (a scan over ranks: Martin and Cundy, Parallelizing Linear Recurrent Neural Nets Over
Sequence Length, 2018, section 2.2). A convolution is told the last tokens of the ranks before.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from cosmos_parallel.native.delta_rule import apart, causal_convolution, delta_response, together
from cosmos_parallel.sequences import Visibility, gather_sequence


@dataclass(frozen=True, slots=True)
class Stretch:
    """What this rank has of B rows, one after the other.

    Attributes:
        offsets: where samples begin, or what is here of them, and at last where they end.
        first: int64[B], which of them each row begins with.
        last: int64[B], which it ends with.
        before: int64[B], how many tokens of the first the ranks before have.
        open_rows: int64[C], the rows where they have any.
        group: the ranks, in the order of their stretches.
    """

    offsets: list[int]
    first: Tensor
    last: Tensor
    before: Tensor
    open_rows: Tensor
    group: dist.ProcessGroup

    @classmethod
    def of(cls, positions: Tensor, sight: Visibility) -> "Stretch":
        """Read it off this rank's positions, and off what its tokens see of all.

        Args:
            positions: ``[B, T / ranks]``; 0 where a sample begins.
            sight: of a group.
        """
        assert sight.mask is not None, "ranks that share rows have a mask"
        assert sight.group is not None, "whole rows are no stretches"
        starts = positions == 0
        starts[:, 0] = True
        counts = starts.sum(dim=1)
        before = sight.mask[:, 0, 0].sum(dim=-1) - 1  # but for the first token itself
        return cls(
            offsets=[*starts.flatten().nonzero().flatten().tolist(), starts.numel()],
            first=counts.cumsum(0) - counts,
            last=counts.cumsum(0) - 1,
            before=before,
            open_rows=before.nonzero().flatten(),
            group=sight.group,
        )


def convolve_stretch(sequence: Tensor, weight: Tensor, stretch: Stretch) -> Tensor:
    """Return the causal convolution of this rank's stretches; every rank of the group calls.

    Args:
        sequence: ``[1, B T / ranks, C]``.
        weight: ``[C, 1, W]``.
        stretch: which samples those are.
    """
    rows = sequence[0].unflatten(0, (len(stretch.first), -1))
    reach = weight.shape[-1] - 1
    told = min(reach, rows.shape[1])  # of short stretches all
    ends = gather_sequence(rows[:, rows.shape[1] - told :], stretch.group)
    # the last `reach` tokens of all ranks before; zeros before the row
    mine = stretch.group.rank() * told
    before = functional.pad(ends, (0, 0, reach, 0))[:, mine : mine + reach]
    distance = torch.arange(reach, 0, -1, device=sequence.device)
    others = distance > stretch.before[:, None]
    (samples,) = apart(stretch.offsets, sequence)
    found = samples.new_zeros(len(samples), reach, samples.shape[-1]).index_copy(
        0, stretch.first, before.masked_fill(others[..., None], 0.0)
    )
    return together(causal_convolution(samples, weight, found), stretch.offsets)


def delta_rule_of_stretch(stretch: Stretch, *sequences: Tensor) -> Tensor:
    """Return ``[1, B T / ranks, N, V]`` of the gated delta rule; every rank of the group calls.

    Args:
        stretch: which samples the sequences are of.
        *sequences: what `gated_delta_rule` takes, ``[1, B T / ranks, ...]`` each.
    """
    values, rows = sequences[2], stretch.open_rows
    begun = stretch.first[rows]
    found = delta_response(begun, *apart(stretch.offsets, *sequences))
    ends = found.state.index_select(0, stretch.last)
    # where a sample begins on this rank, nothing of what came before goes on to the next
    goes_through = (begun == stretch.last[rows])[:, None, None, None]
    transitions = ends.new_zeros(*ends.shape[:-1], ends.shape[-2]).index_copy(
        0, rows, found.transition * goes_through
    )
    told = gather_sequence(torch.cat([ends, transitions], dim=-1)[:, None], stretch.group)
    given = _states_before(told, values.shape[-1])[stretch.group.rank()][rows]
    added = torch.einsum("ctnk,cnkv->ctnv", found.asked, given)
    outputs = found.outputs.index_add(0, begun, added)
    return together(outputs.type_as(values), stretch.offsets)


def _states_before(told: Tensor, width: int) -> Tensor:
    """Return ``[ranks, B, N, K, V]``, with which the first samples of every rank go on.

    All ranks' are computed by each, of whatever use: those of the first rank take part in
    backward's exchange as well.

    Args:
        told: ``[B, ranks, N, K, V + K]``, what ranks end with of a state of zeros, and what they
            make of another.
        width: V.
    """
    ends, transitions = told.split([width, told.shape[-1] - width], dim=-1)
    states = [torch.zeros_like(ends[:, 0])]
    for end, transition in zip(ends.unbind(1), transitions.unbind(1), strict=True):
        states.append(transition @ states[-1] + end)
    return torch.stack(states[:-1])
