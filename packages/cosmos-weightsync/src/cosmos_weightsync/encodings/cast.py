"""The encodings that keep a tensor's shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from cosmos_weightsync.encodings.contract import Extents
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import Shard, cast_spec, check_wire_dtype

__all__ = ["Cast"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """Floating tensors in another dtype, rounded once on the sender; others as they are.

    Attributes:
        dtype: By torch name: ``bfloat16``. Empty keeps each tensor's own.
        names: Patterns of the tensors' names.

    Raises:
        LayoutError: not a dtype that floating tensors can be cast to.
    """

    dtype: str
    names: tuple[str, ...] = ("*",)
    kind: Literal["cast"] = "cast"

    def __post_init__(self) -> None:
        check_wire_dtype(self.dtype)

    def published(self, spec: ShardSpec) -> tuple[ShardSpec, ...]:
        """The same box in the other dtype."""
        return (cast_spec(spec, self.dtype),)

    def blocks(self, spec: ShardSpec) -> tuple[Extents, ...]:
        """None are needed."""
        del spec
        return ()

    def together(self, spec: ShardSpec) -> tuple[str, ...]:
        """Nothing is shared."""
        del spec
        return ()

    def write(self, shard: Shard, maxima: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """See `Encoding.write`."""
        del maxima
        into[0].copy_(shard.tensor, non_blocking=True)
