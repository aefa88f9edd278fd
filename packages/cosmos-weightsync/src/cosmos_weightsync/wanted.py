"""What a receiver wants and the memory it lands in."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from cosmos_weightsync.arenas import Arena, Memory
from cosmos_weightsync.byte_rows import flat_bytes
from cosmos_weightsync.errors import LayoutError, UnknownTensorError
from cosmos_weightsync.layout import Layout, ShardSpec, check_cast, check_once
from cosmos_weightsync.living import check_in_place
from cosmos_weightsync.planning import nearest_name
from cosmos_weightsync.shards import Shard, check_separate, handed_over, torch_dtype

__all__ = ["Mode", "WantedWeights", "fill"]

Mode = Literal["staged", "in_place"]


def fill(targets: Iterable[Shard], staged: Iterable[Shard]) -> None:
    """Copy staged regions into the memory of those that want them; casts among floating dtypes."""
    arrived = {(shard.spec.name, shard.spec.box): shard.tensor for shard in staged}
    with torch.no_grad():
        for target in targets:
            if not target.spec.box.is_empty:
                target.tensor.copy_(arrived[target.spec.name, target.spec.box])


class WantedWeights:
    """The regions of one receiver, each wanted once.

    Args:
        items: Shards with memory, specs without; ``None`` is everything that is offered.
        mode: ``staged`` gives every version memory of its own beside the shards' tensors;
            ``in_place`` gives it these tensors.
        memory: ``shared`` if other processes of this host are to read versions where they lie.

    Raises:
        LayoutError: a region is wanted twice, or there is no place to put it.
    """

    def __init__(
        self,
        items: Iterable[Shard | ShardSpec] | None,
        mode: Mode,
        memory: Literal["shared", "private"] = "private",
    ) -> None:
        self._memory: Memory = memory
        found = None if items is None else handed_over(items, (Shard, ShardSpec))
        self._mode: Mode = mode
        self.targets = tuple(
            item for item in found or () if isinstance(item, Shard) and not item.spec.box.is_empty
        )
        for target in self.targets:
            check_separate(target)
        specs = (item.spec if isinstance(item, Shard) else item for item in found or ())
        self.specs = None if found is None else tuple(s for s in specs if not s.box.is_empty)
        if mode == "in_place" and (not found or len(self.targets) != len(self.specs or ())):
            raise LayoutError("an in-place receiver needs shards with tensors to receive into")
        check_once(self.specs or (), "this receiver wants")

    @property
    def device(self) -> str:
        """The kind of memory that versions land in."""
        first = self.targets[0].tensor.device.type if self.targets else "cpu"
        return first if self._mode == "in_place" else "cpu"

    def check_in_place(self) -> None:
        """Refuse to fill or to read memory that the model has left.

        Raises:
            LayoutError: names the first tensor that lies elsewhere now.
        """
        check_in_place(self.targets)

    def on_wire(self, senders: Layout) -> tuple[ShardSpec, ...]:
        """The same regions in the dtypes that will arrive.

        Raises:
            LayoutError: they cannot go where they are wanted.
            UnknownTensorError: nobody offers a tensor of this name.
        """
        wanted = senders.full_specs() if self.specs is None else self.specs
        return tuple(self._arriving_as(spec, senders) for spec in wanted)

    def place(self, specs: Sequence[ShardSpec]) -> tuple[tuple[Shard, ...], Arena | None]:
        """Where versions of these specs (from `on_wire`) land, and the arena others read it in.

        Where nobody does it is in huge pages, if the system has them: what arrives is hashed there.
        """
        if self._mode == "in_place":
            return tuple(Shard(t.spec, t.tensor.detach()) for t in self.targets), None
        shapes = [spec.box.shape for spec in specs]
        dtypes = [torch_dtype(spec.dtype) for spec in specs]
        arena = Arena(shapes, dtypes, memory=self._memory)
        if self._memory == "shared":
            return tuple(map(Shard, specs, arena.tensors)), arena
        return tuple(map(Shard, specs, map(_apart, arena.tensors))), None

    def _arriving_as(self, spec: ShardSpec, senders: Layout) -> ShardSpec:
        if spec.name not in senders.tensors:
            raise UnknownTensorError(
                f"{spec.name} {spec.box}: wanted here, none of {senders.num_ranks} sender ranks "
                f"has it; they have {len(senders.tensors)} tensors"
                f"{nearest_name(spec.name, senders.tensors)}"
            )
        dtype = senders.tensors[spec.name].dtype
        if dtype != spec.dtype:
            ranks = senders.geometries[senders.tensors[spec.name].geometry].ranks.tolist()
            holder = f"sender rank {min(ranks, default=0)} sends"
            if self._mode == "in_place" or not self.targets:
                raise LayoutError(
                    f"{spec.name} {spec.box}: wanted here as {spec.dtype}, {holder} {dtype}; set "
                    "its SenderConfig.wire_dtype, or hand over shards to cast into"
                )
            check_cast(spec, dtype, holder)
        return replace(spec, dtype=dtype)


def _apart(tensor: Tensor) -> Tensor:
    """A tensor with a storage of its own in the same memory: whoever saves it saves no others."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    content = torch.from_numpy(flat_bytes(tensor).numpy())
    return content.view(tensor.dtype).view(tensor.shape)
