"""A snapshot's tensors are filled at once, and the checksums of boxes come with them."""

import pytest
import torch

from cosmos_weightsync import Box, DigestError, ShardSpec
from cosmos_weightsync.boxes import subtract_all
from cosmos_weightsync.checksums import tensor_checksum
from cosmos_weightsync.followed import FollowedTensors
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.version_checksums import ChecksumCache

SHAPES: dict[str, tuple[int, ...]] = {"whole": (64, 32), "halves": (40, 256), "alone": (9,)}
BOXES = {
    "whole": [Box((0, 0), (64, 32))],
    "halves": [Box((0, 0), (40, 128)), Box((0, 128), (40, 256))],
    "alone": [],
}


def asked(names=tuple(BOXES)) -> list[Piece]:
    return [Piece(name, box, 0, 0, 4 * box.numel) for name in names for box in BOXES[name]]


def specs() -> list[ShardSpec]:
    return [ShardSpec(name, shape, Box.full(shape), "float32") for name, shape in SHAPES.items()]


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def view_of(tensors):
    held = dict(zip(SHAPES, tensors, strict=True))
    return lambda name, box: held[name][box.relative_to(Box.full(SHAPES[name]))]


def checksum_of(tensors):
    view = view_of(tensors)
    return lambda name, box: tensor_checksum(view(name, box))


def refuse(name, box):
    raise AssertionError(f"{name} {box} is hashed again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_asked_for_is_known_once_the_next_version_is_written(dtype):
    tensors = [torch.zeros(shape) for shape in SHAPES.values()]
    followed, cache, pieces = FollowedTensors(tensors, specs()), ChecksumCache(specs()), asked()
    for turn in range(3):
        sources = [value.to(dtype) for value in values(turn)]
        version = cache.start()
        followed.expect(version.expected)
        followed.copy(range(3), sources)
        version.learn(followed.values)
        assert all(map(torch.equal, tensors, [source.float() for source in sources]))
        view = view_of(tensors)
        sums = version.of_pieces(pieces, refuse if turn else checksum_of(tensors))
        assert sums == [tensor_checksum(view(piece.name, piece.box)) for piece in pieces]


def test_sources_that_moved_are_read_where_they_are_now():
    tensors = [torch.zeros(shape) for shape in SHAPES.values()]
    followed = FollowedTensors(tensors, specs())
    followed.expect(ChecksumCache(specs()).start().expected)
    kept = [values(seed) for seed in range(2)]
    for sources in (*kept, kept[0]):
        followed.copy(range(3), sources)
        assert all(map(torch.equal, tensors, sources))


def test_lists_of_pieces_are_forgotten_two_versions_after_they_were_last_asked_for():
    cache, mine, theirs = ChecksumCache(specs()), asked(), asked(["whole"])
    tensors = values(0)
    for turn in range(5):
        version = cache.start()
        if turn == 0:
            version.of_pieces(mine, checksum_of(tensors))
        version.of_pieces(theirs, checksum_of(tensors))
        # "alone" and, before and after somebody asked for halves of it, "halves" as wholes.
        expected = 3 if turn == 0 else len(mine) + 1 if turn < 3 else len(theirs) + 2
        assert len(version.expected.keys) == expected
    assert version.expected.numbers_of(theirs) == [0]
    assert version.expected.numbers_of(list(theirs)) is None


def test_a_part_of_what_was_asked_for_needs_no_hashing_either():
    tensors = values(0)
    followed, cache, pieces = FollowedTensors(tensors, specs()), ChecksumCache(specs()), asked()
    cache.start().of_pieces(pieces, checksum_of(tensors))
    version = cache.start()
    followed.expect(version.expected)
    followed.copy(range(3), values(1))
    version.learn(followed.values)
    assert version.of_pieces(pieces[1:], refuse) == version.of_pieces(pieces, refuse)[1:]


COLUMNS = [Piece("halves", Box((0, 64), (40, 192)), 0, 0, 4 * 40 * 128)]  # Of both halves.


@pytest.mark.parametrize("is_known", [False, True], ids=["first", "newcomer"])
def test_boxes_that_nobody_asked_for_are_held_against_what_was_written(is_known):
    tensors = values(0)
    followed, cache = FollowedTensors(tensors, specs()), ChecksumCache(specs())
    if is_known:
        cache.start().of_pieces(asked(), checksum_of(tensors))
    version = cache.start()
    followed.expect(version.expected)
    followed.copy(range(3), values(1))
    version.learn(followed.values)
    checksum, damaged = checksum_of(tensors), tensors[1][7, 100:101].view(torch.int32)
    damaged.bitwise_xor_(1)
    with pytest.raises(
        DigestError, match=r"halves \[0:40, 0:\d+\]: what is kept .* has changed since"
    ):
        version.of_pieces(COLUMNS, checksum)
    damaged.bitwise_xor_(1)
    assert version.of_pieces(COLUMNS, checksum) == [tensor_checksum(tensors[1][:, 64:192])]
    assert version.of_pieces(COLUMNS, refuse) == version.of_pieces(COLUMNS, checksum)


def test_all_of_a_version_is_hashed_while_it_is_written():
    boxes = {"halves": [Box((0, 0), (40, 64)), Box((10, 64), (40, 200))], "whole": [], "alone": []}
    pieces = [Piece(name, box, 0, 0, 4 * box.numel) for name in boxes for box in boxes[name]]
    cache = ChecksumCache(specs())
    cache.start().of_pieces(pieces, checksum_of(values(0)))
    found = cache.start().expected.boxes
    for spec in specs():
        assert subtract_all(spec.box, found[spec.name]) == ()
        assert sum(box.numel for box in found[spec.name]) == spec.box.numel


def test_where_columns_lie_is_told_and_changes_only_with_what_is_asked_for():
    tensors = [torch.zeros(shape) for shape in SHAPES.values()]
    followed = FollowedTensors(tensors, specs(), may_arrange=True)
    cache, pieces, sources = ChecksumCache(specs()), asked(), values(1)

    def publish() -> list[tuple[str, Box]]:
        version = cache.start()
        followed.expect(version.expected)
        followed.copy(range(3), sources)
        version.learn(followed.values)
        view = view_of(sources)
        for name, box, tensor in followed.placed:
            assert torch.equal(tensor, view(name, box))
        version.of_pieces(pieces, checksum_of(sources))
        return [(name, box) for name, box, _ in followed.placed]

    wholes = [(name, Box.full(shape)) for name, shape in SHAPES.items()]
    assert publish() == wholes
    halves = [("halves", box) for box in BOXES["halves"]]
    assert publish() == [wholes[0], *halves, wholes[2]]
    placed = followed.placed
    assert publish() == [wholes[0], *halves, wholes[2]]
    assert followed.placed is placed
    pieces = [*asked(), *COLUMNS]  # Of both halves: the memory cannot please everybody.
    publish()
    assert publish() == wholes


def test_what_somebody_else_wrote_lies_as_it_was_written():
    tensors = values(2)
    followed, cache = FollowedTensors(tensors, specs(), may_arrange=True), ChecksumCache(specs())
    cache.start().of_pieces(asked(), checksum_of(tensors))
    version = cache.start()
    followed.expect(version.expected)
    followed.copy(range(3), values(3))
    assert len(followed.placed) == 4
    tensors[1].copy_(values(4)[1])
    followed.written(1)
    version.learn(followed.values)
    assert [name for name, _, _ in followed.placed] == list(SHAPES)
    assert version.of_pieces(asked(["halves"]), refuse) == [
        tensor_checksum(values(4)[1][:, part]) for part in (slice(0, 128), slice(128, 256))
    ]
