"""What is known about torch's operations when a weight loader is recorded; tables, no state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ANSWERS",
    "CASTS",
    "READS",
    "SAME_VALUES",
    "VIEWS",
    "WRITES",
    "Cast",
    "changed_by",
    "function_name",
    "wanted_dtype",
    "written_by",
]

# fmt: off
VIEWS = frozenset({
    "H", "T", "__getitem__", "alias", "chunk", "data", "detach", "expand", "expand_as", "flatten",
    "mH", "mT", "movedim", "narrow", "permute", "reshape", "select", "split", "split_with_sizes",
    "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten",
    "unsqueeze", "view", "view_as",
})
"""Operations that read no value; each still has to prove that its outcome is a view."""

ANSWERS = frozenset({
    "__len__", "device", "dim", "dtype", "element_size", "get_device", "is_complex",
    "is_contiguous", "is_cpu", "is_cuda", "is_floating_point", "is_leaf", "is_meta", "itemsize",
    "layout", "nbytes", "ndim", "ndimension", "nelement", "numel", "requires_grad", "shape",
    "size", "storage_offset", "stride",
})
"""Questions that need no value."""
# fmt: on

WRITES = frozenset(["copy_", "fill_", "zero_", "__setitem__", "data="])
"""Operations that put values into their first argument."""

METADATA = frozenset([
    "detach_", "rename_", "requires_grad_", "share_memory_", "squeeze_", "swapaxes_", "swapdims_",
    "t_", "transpose_", "unsqueeze_",
])  # fmt: skip
"""Operations in place that leave the values as they are."""

SAME_VALUES = frozenset(["clone", "contiguous", "cpu", "cuda", "pin_memory"])
CASTS: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
READS: Mapping[str, Any] = {
    "item": 0,
    "tolist": [],
    "__bool__": False,
    "__float__": 0.0,
    "__int__": 0,
    "equal": False,
    "allclose": False,
    "is_nonzero": False,
}
"""What to answer to who asks for values; the tensor is opaque from then on."""


@dataclass(frozen=True, slots=True)
class Cast:
    """To another dtype: by value, or (``reinterpret``) the same bits."""

    dtype: torch.dtype
    reinterpret: bool = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """Cast a real tensor."""
        return tensor.view(self.dtype) if self.reinterpret else tensor.to(self.dtype)


def function_name(func: Callable[..., Any]) -> str:
    """What a function of torch is called; ``data=`` is the setter of a property."""
    name = getattr(func, "__name__", "")
    if name in {"__get__", "__set__"}:  # A property: torch.Tensor.T.__get__.
        of = getattr(getattr(func, "__self__", None), "__name__", name)
        return of if name == "__get__" else f"{of}="
    return name.partition(".")[0]  # An overload: torch.ops.aten.add_.Tensor.


def written_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The value that one of `WRITES` puts in place."""
    if name == "zero_":
        return 0.0
    position = 2 if name == "__setitem__" else 1
    return args[position] if len(args) > position else kwargs.get("value", kwargs.get("other"))


def changed_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors whose values an operation changes, by its name: ``add_``, or ``out=``."""
    in_place = name.endswith("_") and not name.endswith("__") and name not in METADATA
    first = (args[0] if args else kwargs.get("tensor")) if in_place else None
    found: list[Tensor] = []
    for given in (first, kwargs.get("out")):
        several: Any = given if isinstance(given, tuple | list) else [given]
        found += [one for one in several if isinstance(one, Tensor)]
    return found


def wanted_dtype(values: Sequence[Any]) -> torch.dtype | None:
    """The dtype among the arguments of ``to`` and the like, or that of a tensor among them."""
    for value in values:
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, Tensor):
            return value.dtype
    return None
