"""Pieces are read in batches, in order, and keep a checksum each."""

import gc
import weakref

import pytest
import torch
from capabilities import skip_without

from cosmos_weightsync import Box, Piece
from cosmos_weightsync.checksums import tensor_checksum
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.edge_pieces import EdgePieces
from cosmos_weightsync.streaming import compiled_rows
from cosmos_weightsync.transports import Side
from cosmos_weightsync.transports.exposing import ToldPlaces
from cosmos_weightsync.transports.windows import MappedWindows

SIZES = [100, 100, 300, 50, 50, 50]


def edge(columns: tuple[int, ...] = ()) -> tuple[EdgePieces, dict[str, torch.Tensor]]:
    """Pieces of so many rows of 16 bytes; those in ``columns`` are half of each row."""
    tensors = {f"w{n}": torch.randn(rows, 4) for n, rows in enumerate(SIZES)}
    boxes = [Box((0, 0), (rows, 2 if n in columns else 4)) for n, rows in enumerate(SIZES)]
    pieces = [Piece(f"w{n}", box, 0, 0, 4 * box.numel) for n, box in enumerate(boxes)]
    return EdgePieces(pieces), tensors


def held(tensors: dict[str, torch.Tensor]) -> HeldBoxes:
    return HeldBoxes((name, Box.full(tensor.shape), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ((), [(0, 2), (2, 3), (3, 6)]),  # The third is larger than a batch.
        ((0, 4), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]),  # No rows of bytes here.
    ],
)
def test_batches_are_as_large_as_allowed_and_in_order(columns, expected):
    pieces, tensors = edge(columns)
    target = held({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    places = pieces.places(target)
    windows = MappedWindows(pieces.places(held(tensors)).views)
    batches = places.batches(windows, 16 * 220)
    assert [(batch.first, batch.stop) for batch in batches] == expected
    assert places.batches(windows, 16 * 220) is batches
    for batch in batches:
        numbers = range(batch.first, batch.stop)
        assert batch.num_bytes == sum(pieces[number].num_bytes for number in numbers)
        assert (batch.take is None) == (batch.first in columns)
        for turn in range(2 if batch.take else 0):
            for number in numbers:
                tensors[f"w{number}"].add_(turn)
            sums = batch.take()
            assert sums == [tensor_checksum(tensors[f"w{number}"]) for number in numbers]
            assert all(torch.equal(places.views[n], tensors[f"w{n}"]) for n in numbers)


@pytest.mark.parametrize(
    ("columns", "message_rows", "sent", "received"),
    [
        ((), 320, [2, 1, 3], [2, 1, 3]),  # The third is larger than a run.
        ((), 100, [2, 2, 3, 1], [2, 0, 0, 0, 3]),  # It is cut, and no part of it a whole piece.
        ((1, 3), 320, [1, 0, 1, 0, 2], [1, 0, 1, 0, 2]),  # No rows of bytes here.
    ],
)
def test_runs_over_a_stream_are_as_long_as_allowed(columns, message_rows, sent, received):
    compiled = compiled_rows()
    if compiled is None:
        skip_without("compiler", "none was there when the package was built")
    pieces, tensors = edge(columns)
    here = held(tensors)
    places = pieces.places(here)
    placed = places.messages(pieces.messages(16 * message_rows, 64), here, torch.device("cpu"))
    sides: list[tuple[Side, list[int]]] = [("sender", sent), ("receiver", received)]
    for side, expected in sides:
        runs = places.runs(placed, side, compiled, 16 * 220)
        assert [each for run in runs for each in run.placed] == placed
        assert [0 if run.moves is None else len(run.placed) for run in runs] == expected
        assert places.runs(placed, side, compiled, 16 * 220) is runs


def test_what_is_kept_of_memory_goes_with_it():
    pieces, tensors = edge()
    here = held(tensors)
    views = weakref.ref(pieces.places(here).views)
    told = ToldPlaces()
    assert told.news(7, views(), torch.Tensor.data_ptr) == [t.data_ptr() for t in tensors.values()]
    assert told.news(7, views(), torch.Tensor.data_ptr) is None
    assert told.news(7, list(views()), torch.Tensor.data_ptr) is None
    del here
    gc.collect()
    assert views() is None
