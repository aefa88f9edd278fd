"""What is known about torch's operations when a weight loader is recorded; tables, no state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ANSWERS", "CASTS", "READS", "SAME_VALUES", "VIEWS", "WRITES", "Cast"]

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

SAME_VALUES = frozenset(["clone", "contiguous", "cpu", "cuda"])
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
