"""Sums over each sample of a ``[B, T]`` tensor, given back at every token of the sample.

A row is a sample, or several one after the other when ``segments`` numbers them; what belongs to
a whole sample (its geometric ratio, its mean divergence) is worked out here, whichever it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cosmos_algos.arguments import check_mask, check_same_shape, check_whole


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Which tokens belong together.

    Attributes:
        trainable: true for the tokens that count.
        segments: number of the sample in its row, from 0; ``None`` where a row is one sample.
    """

    trainable: Bool[Tensor, "B T"]
    segments: Int[Tensor, "B T"] | None = None

    def __post_init__(self) -> None:
        """Refuse a mask of numbers, and segments that are not of its tokens.

        Raises:
            ShapeError: names what is wrong.
        """
        check_mask("samples: trainable", self.trainable)
        if self.segments is not None:
            tensors = {"trainable": self.trainable, "segments": self.segments}
            check_same_shape("samples", tensors)
            check_whole("samples: segments", self.segments)

    def check(self, subject: str, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that do not have one number for each token.

        Args:
            subject: what they are for.
            tensors: by the names of arguments.

        Raises:
            ShapeError: names all of them.
        """
        check_same_shape(subject, {"samples": self.trainable, **tensors})

    def sums(self, values: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Add the counting tokens of each sample; every token of the sample gets the sum."""
        self.check("samples", {"values": values})
        kept = values.where(self.trainable, 0.0)
        if self.segments is None:
            return kept.sum(-1, keepdim=True).expand_as(values)
        size = int(self.segments.max()) + 1 if self.segments.numel() else 1
        sums = kept.new_zeros(kept.shape[0], size).scatter_add(1, self.segments, kept)
        return sums.gather(1, self.segments)

    def means(self, values: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Average over the counting tokens of each sample; 0 for a sample without any."""
        counts = self.sums(torch.ones_like(values))
        return self.sums(values) / counts.clamp(min=1.0)

    def largest(self, values: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return the largest counting value of each sample; -inf for a sample without any."""
        self.check("samples", {"values": values})
        kept = values.masked_fill(~self.trainable, -torch.inf)
        if self.segments is None:
            return kept.amax(-1, keepdim=True).expand_as(values)
        size = int(self.segments.max()) + 1 if self.segments.numel() else 1
        empty = kept.new_full((kept.shape[0], size), -torch.inf)
        return empty.scatter_reduce(1, self.segments, kept, "amax").gather(1, self.segments)
