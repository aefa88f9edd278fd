"""Checksums that are taken while rows are copied are those of the finished tensor."""

import pytest
import torch

from cosmos_weightsync import Box
from cosmos_weightsync.checksums import BLOCK_BYTES, tensor_checksum
from cosmos_weightsync.row_checksums import RowChecksums, copy_by_rows

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
    copy_by_rows(source, into, checksums.written)
    assert torch.equal(into, source.to(published))
    assert checksums.values == [tensor_checksum(into[part]) for part in parts]


def test_bands_come_in_order_and_fit_the_cache():
    source, bands = torch.zeros(1000, 1000), []
    copy_by_rows(source, torch.empty_like(source), lambda start, stop: bands.append((start, stop)))
    assert [start for start, _ in bands[1:]] == [stop for _, stop in bands[:-1]]
    assert (bands[0][0], bands[-1][1]) == (0, 1000)
    assert all((stop - start) * 4000 <= BLOCK_BYTES for start, stop in bands)
