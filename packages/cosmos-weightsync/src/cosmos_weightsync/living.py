"""The tensors that shards are views of, watched: a view does not follow one that is replaced."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_weightsync.errors import LayoutError

__all__ = ["LiveTensor", "Watched", "check_in_place", "live_parameter", "live_tensor"]


class _Place(NamedTuple):
    """Where a tensor's values are.

    A storage that was emptied and filled again, as trainers do that share their device, has another
    address, and views of it are views of it still; so it is itself that counts, or its address.
    """

    address: int
    storage: int
    offset: int

    def is_of(self, other: "_Place | None") -> bool:
        """Whether views of what was here are views of what is there."""
        if other is None:
            return False
        is_same = (self.storage, self.offset) == (other.storage, other.offset)
        return is_same or self.address == other.address


@dataclass(frozen=True, eq=False, slots=True)
class LiveTensor:
    """A tensor as it was when it was described.

    Attributes:
        name: Under which it was described.
        tensor: Itself, no view of it: ``model.to`` gives it other memory.
        place: Of its memory then; ``None`` of a kind of tensor that does not tell.
        owner: The module it is a parameter of, as far as is known.
        attribute: As which.
        root: The model that was described.
    """

    name: str
    tensor: Tensor
    place: "_Place | None"
    owner: "weakref.ref[nn.Module] | None" = None
    attribute: str = ""
    root: "weakref.ref[nn.Module] | None" = None

    def is_in_place(self, trained: "_Trained") -> bool:
        """Whether its memory is where it was, and the model has no other in its place."""
        if self.place is None:
            return True
        owner = self.owner() if self.owner is not None else None
        held = None if owner is None else vars(owner)["_parameters"].get(self.attribute)
        now = self.tensor
        if held is None:  # Moved into another module, as `parametrize` does, or gone.
            root = self.root() if self.root is not None else None
            if root is not None and id(now) not in trained.of(root):
                return False
        elif _stands_in(held, now):
            now = held
        elif not _is_gathered(held, now):
            return False
        return self.place.is_of(_place(now))


class _Trained:
    """The parameters of models, looked up once in each check."""

    def __init__(self) -> None:
        self._of: dict[int, frozenset[int]] = {}

    def of(self, root: nn.Module) -> frozenset[int]:
        """Their identities."""
        if id(root) not in self._of:
            self._of[id(root)] = frozenset(map(id, root.parameters()))
        return self._of[id(root)]


class Watched(Protocol):
    """A shard."""

    @property
    def live(self) -> LiveTensor | None:
        """What it is a view of, if it was described from a tensor."""
        ...


def live_tensor(name: str, tensor: Tensor) -> LiveTensor:
    """A tensor of nobody that is known."""
    return LiveTensor(name, tensor, _place(tensor))


def live_parameter(name: str, path: str, tensor: Tensor, module: nn.Module) -> LiveTensor:
    """A parameter at a path of a module."""
    place, _, attribute = path.rpartition(".")
    owner = weakref.ref(module.get_submodule(place))
    return LiveTensor(name, tensor, _place(tensor), owner, attribute, weakref.ref(module))


def check_in_place(shards: Iterable[Watched]) -> None:
    """Refuse shards whose tensors have other memory now: what they view is of no use any more.

    Raises:
        LayoutError: names the first.
    """
    trained = _Trained()
    for shard in shards:
        if shard.live is not None and not shard.live.is_in_place(trained):
            raise LayoutError(
                f"{shard.live.name}: the model has other memory for it than when it was described "
                "(after 'fully_shard', 'accelerator.prepare', 'model.to', '.data = ', "
                "'load_state_dict(assign=True)' or the like): "
                "describe the model again, by 'shards_of', and make another sender or receiver"
            )


def _stands_in(held: Tensor, described: Tensor) -> bool:
    """Whether a module's parameter is of the kind that was described."""
    if type(held) is not type(described) or held.shape != described.shape:
        return False
    if isinstance(held, DTensor) and isinstance(described, DTensor):
        return held.placements == described.placements and held.device_mesh == described.device_mesh
    return True


def _is_gathered(held: Tensor, described: Tensor) -> bool:
    """Whether it is what FSDP2 puts in a sharded parameter's place for a while.

    That is no DTensor, or one of no more placements, and says nothing of the sharded one. The other
    way round, the model was sharded after it was described, and nobody trains what was.
    """
    if not isinstance(described, DTensor) or held.shape != described.shape:
        return False
    return not isinstance(held, DTensor) or held.device_mesh.ndim <= described.device_mesh.ndim


def _place(tensor: Tensor) -> _Place | None:
    local = (
        tensor._local_tensor  # pyright: ignore[reportPrivateUsage]  # Asked for at every publish.
        if isinstance(tensor, DTensor)
        else tensor
    )
    try:
        address = local.data_ptr()
    except RuntimeError:  # A subclass that wraps others, or holds nothing.
        return None
    storage = local.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # No other name.
    return _Place(address, storage, int(local.storage_offset()))
