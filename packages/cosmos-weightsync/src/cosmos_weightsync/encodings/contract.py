"""What an encoding is: the shards that go over the wire in place of one shard of the model.

```
construction:  published(spec) ─► specs of the tensors that receivers see
every publish: block maxima of the whole tensor (see `amax`) ─► write(shard, maxima, tensors)
```
An encoding is a frozen description; it holds no tensor and is shared by all shards it applies to.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import Shard

__all__ = ["Encoding", "Extents"]

Extents = tuple[int, ...]
"""How far a block reaches in every dim of a tensor."""


class Encoding(Protocol):
    """How some tensors are published."""

    @property
    def names(self) -> tuple[str, ...]:
        """Patterns (`fnmatch`) of the names of the tensors it applies to."""
        ...

    def published(self, spec: ShardSpec) -> tuple[ShardSpec, ...]:
        """What is sent instead of this shard.

        Raises:
            EncodingError: it cannot be encoded, whatever its values.
        """
        ...

    def blocks(self, spec: ShardSpec) -> tuple[Extents, ...]:
        """The blocks whose largest magnitudes `write` needs, if any."""
        ...

    def together(self, spec: ShardSpec) -> tuple[str, ...]:
        """Who shares each of `blocks`: tensors with one name here have one maximum per block.

        Empty for blocks of this tensor alone.
        """
        ...

    def write(self, shard: Shard, maxima: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Encode the shard as it is now.

        Args:
            shard: The live values.
            maxima: For each of `blocks`, the largest magnitude in every block that the shard
                touches, parts on other ranks included: float32, finite, on the shard's device.
            into: One contiguous tensor for each of `published`; copies may be non-blocking.
        """
        ...
