"""Samples that begin alike: train what they share once, or compute it once.

Branches of one conversation repeat its history. ``shared_prefix_masks`` keeps each distinct prefix
trainable in one branch; ``prefix_tree_mask`` is the attention of a prompt followed by several
responses in one row, each of which sees the prompt and itself.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cosmos_algos.arguments import check_lengths, check_whole
from cosmos_algos.errors import ShapeError
from cosmos_core.trajectory import Trajectory


def shared_prefix_masks(
    token_ids: Sequence[npt.NDArray[np.int32]],
    groups: Sequence[Hashable],
    trainable: Sequence[npt.NDArray[np.bool_]] | None = None,
) -> list[npt.NDArray[np.bool_]]:
    """Return, for each sample, where its tokens end a prefix that no earlier one of its group has.

    m_it is true where y_i[:t+1] = y_j[:t+1] for no j < i of the group that trains y_jt. And it with
    ``trainable``: every distinct prefix is then trained once, in the first sample that trains it.
    For samples [1 2 3] and [1 2 4] of one group these are [T T T] and [F F T].

    Args:
        token_ids: the samples.
        groups: the group of each.
        trainable: which tokens each trains, where one may have as context what another said;
            ``None`` where samples train all that they do not begin with alike.
    """
    check_lengths("shared prefixes", {"samples": token_ids, "group entries": groups})
    trained = [np.ones(len(ids), np.bool_) for ids in token_ids] if trainable is None else trainable
    check_lengths("shared prefixes", {"samples": token_ids, "masks": trained})
    earlier: dict[Hashable, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]] = {}
    masks: list[npt.NDArray[np.bool_]] = []
    for tokens, own, group in zip(token_ids, trained, groups, strict=True):
        others = earlier.setdefault(group, [])
        mask = np.ones(len(tokens), np.bool_)
        for other, marks in others:
            shared = _common_length(tokens, other)
            mask[:shared] &= ~marks[:shared]
        masks.append(mask)
        others.append((tokens, own))
    return masks


def prefixes_trained_once(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return samples of which each trains what no earlier one of its group does behind the same.

    What is left out has no log-probability any more; all else of a sample stays as it is, the
    versions that sampled it too. Samples that saw other pictures have nothing in common, since
    pictures stand behind the same tokens.
    """
    masks = shared_prefix_masks(
        [trajectory.token_ids for trajectory in trajectories],
        [(trajectory.group, trajectory.images) for trajectory in trajectories],
        [trajectory.trainable for trajectory in trajectories],
    )
    return [_narrowed(each, mask) for each, mask in zip(trajectories, masks, strict=True)]


def _narrowed(trajectory: Trajectory, mask: npt.NDArray[np.bool_]) -> Trajectory:
    kept = trajectory.trainable & mask
    teacher = trajectory.teacher
    return replace(
        trajectory,
        trainable=kept,
        logprobs=np.where(kept, trajectory.logprobs, np.float32(0.0)),
        teacher=None if teacher is None else teacher.where(kept),
    )


def prefix_tree_mask(segments: Int[Tensor, " T"]) -> Bool[Tensor, "T T"]:
    """Return which columns each token sees, for a shared prefix and its continuations in a row.

    Each prefix is computed once, as in Tree Training (arXiv 2511.00413), and every continuation
    has the logits that it has alone.

    Args:
        segments: 0 for the prefix, 1, 2, … for the continuations, -1 for padding.

    Returns:
        True at [i, j] where j <= i, and j is in the prefix or in the continuation of i.
    """
    _check_row(segments)
    causal = torch.ones(len(segments), len(segments), dtype=torch.bool).tril().to(segments.device)
    same = segments[:, None] == segments[None, :]
    return causal & (same | (segments == 0)[None, :]) & (segments >= 0)[:, None]


def prefix_tree_positions(segments: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
    """Return the position of each token in its own sample: continuations all start at |prefix|."""
    _check_row(segments)
    prefix = int((segments == 0).sum())
    positions = torch.zeros_like(segments)
    for number in segments.unique().tolist():
        here = segments == number
        start = prefix if number > 0 else 0
        positions[here] = torch.arange(int(here.sum()), device=segments.device) + start
    return positions


def _check_row(segments: Tensor) -> None:
    check_whole("prefix tree: segments", segments)
    if segments.dim() != 1:
        raise ShapeError(f"prefix tree: segments {tuple(segments.shape)}; they must be [T]")


def _common_length(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
