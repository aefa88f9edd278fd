"""Copies by wider elements have the same bytes, and reach nothing beside them."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from cosmos_weightsync.wide_views import copy_wide


class Noted(Tensor):
    """Notes the dtype of what is copied into it."""

    seen: ClassVar[list[torch.dtype]] = []

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is Tensor.copy_:
            cls.seen.append(arguments[0].dtype)
        return super().__torch_function__(function, types, arguments, keywords or {})


@pytest.mark.parametrize(
    ("dtype", "start", "width", "expected"),
    [
        (torch.float32, 0, 64, torch.complex128),
        (torch.float32, 2, 62, torch.int64),  # neither begins nor ends at 16 bytes
        (torch.float32, 1, 64, torch.float32),
        (torch.bfloat16, 8, 24, torch.complex128),
        (torch.bfloat16, 2, 30, torch.int32),
        (torch.float8_e4m3fn, 2, 30, torch.int16),
        (torch.float8_e4m3fn, 1, 3, torch.float8_e4m3fn),
    ],
)
def test_bytes_are_those_of_a_plain_copy(dtype, start, width, expected):
    raw = torch.randint(0, 256, (5, 128 * dtype.itemsize), dtype=torch.uint8)
    source = raw.view(dtype)[:, start : start + width]
    whole = torch.zeros(5, 128 * dtype.itemsize, dtype=torch.uint8)
    target = whole.view(dtype)[:, start : start + width].as_subclass(Noted)
    Noted.seen.clear()
    copy_wide(source, target)
    assert Noted.seen == [expected]
    first, last = start * dtype.itemsize, (start + width) * dtype.itemsize
    assert torch.equal(whole[:, first:last], raw[:, first:last])
    whole[:, first:last] = 0
    assert not whole.any()


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.tensor(3.0),
        torch.arange(0.0),
        torch.arange(8.0)[None].expand(3, 8),
        torch.arange(40.0).reshape(5, 8)[:, ::2],
    ],
    ids=["turned", "number", "empty", "spread", "with gaps"],
)
def test_what_has_no_rows_of_wide_elements_is_copied_too(source):
    target = torch.full(source.shape, -1.0)
    copy_wide(source, target)
    assert torch.equal(source, target)
