"""Pieces are cut and packed into messages that carry every byte once, in order."""

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_weightsync import Box, LayoutError, Piece
from cosmos_weightsync.checksums import tensor_checksum
from cosmos_weightsync.chunks import DIRECT_BYTES, HeldBoxes, pack, piece_checksum, schedule
from cosmos_weightsync.placed_messages import PieceSums, PlacedMessage

CPU = torch.device("cpu")


def piece(name: str, box: Box, item_bytes: int = 4) -> Piece:
    return Piece(name, box, 0, 0, box.numel * item_bytes)


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=6),
    bucket=st.sampled_from([4, 20, 64, 1000]),
)
@settings(max_examples=100, deadline=None)
def test_packing_and_unpacking_moves_every_element(shapes, bucket):
    tensors = {
        f"t{i}": torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + i
        for i, shape in enumerate(shapes)
    }
    pieces = [piece(name, Box.full(tensor.shape)) for name, tensor in tensors.items()]
    sent = HeldBoxes((name, Box.full(t.shape), t) for name, t in tensors.items())
    copies = {name: torch.full_like(t, -1) for name, t in tensors.items()}
    received = HeldBoxes((name, Box.full(t.shape), t) for name, t in copies.items())
    messages = list(schedule(pieces, bucket))
    ends = [
        (PlacedMessage(each, sent, CPU), PlacedMessage(each, received, CPU)) for each in messages
    ]
    for _ in range(2):  # What was prepared for one version is used for the next.
        sums = PieceSums(pieces)
        for source, target in ends:
            assert source.message.num_bytes <= bucket
            content = source.pack(sent, torch.empty(bucket, dtype=torch.uint8))
            into = content.clone() if target.flat is None else target.flat
            into.copy_(content)
            target.end(received, into, sums)
        for (name, tensor), value in zip(tensors.items(), sums.values(), strict=True):
            assert torch.equal(copies[name], tensor)
            assert value == xxhash.xxh3_64_intdigest(tensor.numpy().tobytes())
            tensor.neg_()


def test_large_contiguous_pieces_travel_in_place():
    tensor = torch.zeros(DIRECT_BYTES // 4 + 5)
    held = HeldBoxes([("w", Box.full(tensor.shape), tensor)])
    (message,) = schedule([piece("w", Box.full(tensor.shape))], 1 << 20)
    view = PlacedMessage(message, held, CPU).flat
    assert view is not None
    assert view.data_ptr() == tensor.data_ptr()


def test_strided_pieces_are_packed():
    tensor = torch.arange(12.0).reshape(3, 4)
    held = HeldBoxes([("w", Box.full((3, 4)), tensor)])
    columns = Box((0, 1), (3, 3))
    (message,) = schedule([piece("w", columns)], 1 << 20)
    assert PlacedMessage(message, held, CPU).flat is None
    packed = pack(message, held, torch.empty(1 << 20, dtype=torch.uint8))
    assert packed.view(torch.float32).tolist() == [1, 2, 5, 6, 9, 10]


def test_small_pieces_share_a_message_at_aligned_offsets():
    pieces = [piece("a", Box((0,), (3,)), 2), piece("b", Box((0,), (1,)), 8)]
    (message,) = schedule(pieces, 1 << 20)
    assert [chunk.offset for chunk in message.chunks] == [0, 64]
    assert message.num_bytes == 72


def test_a_checksum_of_memory_equals_that_of_the_messages():
    tensor = torch.randn(7, 5)
    held = HeldBoxes([("w", Box.full((7, 5)), tensor)])
    part = piece("w", Box((1, 1), (6, 4)))
    sums = PieceSums([part])
    for message in schedule([part], 32):
        content = pack(message, held, torch.empty(32, dtype=torch.uint8))
        PlacedMessage(message, held, CPU).end(held, content, sums)
    assert sums.values() == [piece_checksum(held, part)]


def test_what_is_not_held_cannot_be_viewed():
    held = HeldBoxes([("w", Box((0,), (4,)), torch.zeros(4))])
    with pytest.raises(LayoutError, match=r"w: \[2:6\] is not held here"):
        held.view("w", Box((2,), (6,)))


def test_a_box_of_several_tensors_is_copied_where_it_cannot_be_viewed():
    full = torch.arange(6 * 8.0).reshape(6, 8)
    halves = [(Box((0, 0), (6, 4)), full[:, :4]), (Box((0, 4), (6, 8)), full[:, 4:])]
    held = HeldBoxes(("w", box, half.contiguous()) for box, half in halves)
    whole, part = Box((1, 2), (5, 7)), Box((1, 4), (5, 7))
    assert not held.is_whole("w", whole)
    assert held.is_whole("w", part)
    assert held.rows("w", whole) is held.raw("w", whole) is None
    with pytest.raises(LayoutError, match=r"w: \[1:5, 2:7\] is not held here"):
        held.view("w", whole)
    room = torch.empty(100, dtype=torch.uint8)
    assert torch.equal(held.copied("w", whole, room), full[1:5, 2:7])
    for box in (whole, part):
        expected = full[box.relative_to(Box.full((6, 8)))]
        assert held.checksum("w", box) == tensor_checksum(expected)
        (message,) = schedule([piece("w", box)], 1 << 10)
        placed = PlacedMessage(message, held, CPU)
        packed = placed.pack(held, torch.empty(1 << 10, dtype=torch.uint8))
        assert torch.equal(packed.view(torch.float32).view(box.shape), expected)
    for missing in (Box((0, 0), (7, 8)), Box((6, 0), (7, 8))):
        with pytest.raises(LayoutError, match="is not held here"):
            held.copied("w", missing, torch.empty(1 << 10, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="is not held here"):
        held.copied("v", whole, room)


def test_the_checksum_of_a_large_box_of_several_tensors_is_taken_part_by_part():
    full = torch.randn(700, 1000)
    halves = [(Box((0, 0), (700, 300)), full[:, :300]), (Box((0, 300), (700, 1000)), full[:, 300:])]
    held = HeldBoxes(("w", box, half.contiguous()) for box, half in halves)
    assert held.checksum("w", Box.full((700, 1000))) == tensor_checksum(full)
