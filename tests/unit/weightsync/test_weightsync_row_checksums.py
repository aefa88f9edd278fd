"""Checksums that are taken while rows are copied are those of the finished tensor."""

import pytest
import torch

from cosmos_weightsync import Box
from cosmos_weightsync.checksums import tensor_checksum
from cosmos_weightsync.row_checksums import RowChecksums

# (shape, boxes inside it)
CASES: dict[str, tuple[tuple[int, ...], list[Box]]] = {
    "rows and columns": (
        (1030, 600),
        [Box((0, 0), (1030, 600)), Box((3, 0), (700, 600)), Box((3, 77), (1030, 333))],
    ),
    "experts": (
        (3, 400, 500),  # A row is larger than a block.
        [Box((1, 0, 0), (3, 400, 500)), Box((0, 100, 0), (3, 200, 500)), Box((0, 5, 7), (2, 9, 9))],
    ),
    "halves": ((64, 512), [Box((0, 0), (64, 256)), Box((0, 256), (64, 512))]),
    "a hole between": ((64, 512), [Box((0, 0), (30, 256)), Box((8, 256), (64, 400))]),
    "vector": ((200_000,), [Box((0,), (200_000,)), Box((7,), (150_001,))]),
    "scalar": ((), [Box((), ())]),
    "no rows": ((0, 4), []),
    "nobody asks": ((9, 9), []),
}


@pytest.mark.parametrize("dtypes", ["float32 bfloat16", "bfloat16 bfloat16", "int8 int8"])
@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_rows_are_copied_and_hashed_as_the_whole_would_be(case, strides, dtypes):
    shape, boxes = CASES[case]
    held, published = (getattr(torch, name) for name in dtypes.split())
    source = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(3))).to(held)
    if strides == "transposed":
        source = source.movedim(0, -1).contiguous().movedim(-1, 0) if shape else source
    into = torch.empty(shape, dtype=published)
    parts = [box.relative_to(Box.full(shape)) for box in boxes]
    checksums = RowChecksums(into, parts)
    checksums.copy(source)
    assert torch.equal(into, source.to(published))
    assert checksums.values == [tensor_checksum(into[part]) for part in parts]


def test_a_tensor_that_somebody_else_filled_is_hashed():
    into = torch.arange(5000.0).view(50, 100)
    parts = [(slice(0, 50), slice(10, 90)), (slice(7, 8), slice(0, 100))]
    checksums = RowChecksums(into, parts)
    checksums.written()
    assert checksums.values == [tensor_checksum(into[part]) for part in parts]


def test_copying_again_hashes_what_is_there_then():
    into = torch.zeros(64, 64)
    checksums = RowChecksums(into, [(slice(0, 64), slice(0, 32)), (slice(0, 64), slice(32, 64))])
    seen = []
    for value in (1.0, 2.0, 1.0):
        checksums.copy(torch.full((64, 64), value))
        seen.append(checksums.values)
    assert seen[0] == seen[2] != seen[1]


# (shape, boxes inside it, whether they are laid out one after another)
ARRANGED: dict[str, tuple[tuple[int, ...], list[Box], bool]] = {
    "halves": ((1030, 512), [Box((0, 0), (1030, 256)), Box((0, 256), (1030, 512))], True),
    "quarters": (
        (64, 512),
        [Box((r, c), (r + 32, c + 256)) for r in (0, 32) for c in (0, 256)],
        True,
    ),
    "of experts": ((5, 64, 32), [Box((0, 0, 0), (5, 24, 32)), Box((0, 24, 0), (5, 64, 32))], True),
    "rows": ((64, 512), [Box((0, 0), (30, 512)), Box((30, 0), (64, 512))], False),
    "one row": ((1, 512), [Box((0, 0), (1, 256)), Box((0, 256), (1, 512))], False),
    "overlapping": ((64, 512), [Box((0, 0), (64, 512)), Box((0, 256), (64, 512))], False),
    "with a hole": ((64, 512), [Box((0, 0), (64, 256)), Box((8, 256), (64, 512))], False),
    "of odd length": ((63, 5), [Box((0, 0), (63, 3)), Box((0, 3), (63, 5))], False),
    "in no rows": ((4, 8, 64), [Box((0, 0, 0), (4, 8, 32)), Box((0, 0, 32), (4, 8, 64))], False),
    "nobody asks": ((64, 64), [], False),
}


@pytest.mark.parametrize("dtypes", ["float32 bfloat16", "float32 float32"])
@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
@pytest.mark.parametrize("case", sorted(ARRANGED))
def test_columns_may_lie_one_after_another(case, strides, dtypes):
    shape, boxes, is_arranged = ARRANGED[case]
    held, published = (getattr(torch, name) for name in dtypes.split())
    source = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(held)
    if strides == "transposed":
        source = source.movedim(0, -1).contiguous().movedim(-1, 0)
    into = torch.zeros(shape, dtype=published)
    parts = [box.relative_to(Box.full(shape)) for box in boxes]
    checksums = RowChecksums(into, parts, may_arrange=True)
    checksums.copy(source)
    expected = source.to(published)
    assert checksums.values == [tensor_checksum(expected[part]) for part in parts]
    assert (checksums.blocks is not None) == is_arranged
    if checksums.blocks is None:
        assert torch.equal(into, expected)
        return
    for block, part in zip(checksums.blocks, parts, strict=True):
        assert block.is_contiguous()
        assert torch.equal(block, expected[part])
    assert sum(block.numel() for block in checksums.blocks) == into.numel()
    assert torch.equal(torch.cat([block.view(-1) for block in checksums.blocks]), into.view(-1))
