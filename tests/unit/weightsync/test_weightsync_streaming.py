"""The compiled copy and hash give, bit for bit, what NumPy and xxhash give."""

import ctypes
import errno
import mmap
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from capabilities import skip_without

from cosmos_weightsync.streaming import (
    SHORTEST_COMPILED,
    CompiledRows,
    PlainRows,
    RowMove,
    RowRead,
    compiled_rows,
    usable_rows,
)

# Where XXH3 changes its formula, where a stripe (64), a block (1024) or a chunk (4096) ends.
LENGTHS = [1, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2048]
LENGTHS += [4095, 4096, 4097, 5121, 65_536, 100_003]
# (rows, bytes of a row, step of the source, step of the target)
SHAPES = [(1, 5000, 5000, 5000), (9, 64, 64, 64), (70, 100, 331, 100), (33, 1024, 4096, 2048)]
SHAPES += [(5, 12_289, 20_000, 12_289), (300, 1, 1, 1), (40, 7, 9, 8), (3, 4096, 4096, 4100)]
SHAPES += [(6, 10_000, 10_304, 10_000), (4, 9000, 9000, 9064)]


@pytest.fixture
def compiled() -> CompiledRows:
    found = compiled_rows()
    if found is None:
        skip_without("compiler", "none was there when the package was built")
    return found


@pytest.fixture(params=["plain", "compiled"])
def engine(request) -> PlainRows | CompiledRows:
    return request.getfixturevalue("compiled") if request.param == "compiled" else PlainRows()


def noise(size: int) -> np.ndarray:
    return np.frombuffer(random.Random(size).randbytes(size), dtype=np.uint8)


def lines(size: int, start: int = 0) -> np.ndarray:
    """Zeros that begin so many bytes behind the start of a cache line."""
    memory = np.zeros(size + 128, np.uint8)
    return memory[start - memory.ctypes.data % 64 + 64 :][:size]


def laid_out(rows: int, row_bytes: int, step: int, content: np.ndarray) -> np.ndarray:
    """Rows with gaps between them."""
    return np.lib.stride_tricks.as_strided(content, (rows, row_bytes), (step, 1))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("start", "line"), [(0, 0), (1, 0), (63, 32), (0, 63), (8, 8)])
def test_a_row_is_copied_and_hashed_as_xxhash_does_it(engine, length, start, line):
    source, target = noise(length + start)[start:], lines(length + 128, line)
    into = target[64 : 64 + length]
    row, expected = source.reshape(1, -1), xxhash.xxh3_64_intdigest(source.data)
    moves = engine.prepare([RowMove(row, into.reshape(1, -1)), RowMove(row, None)])
    assert moves.make() == [expected, expected]
    assert np.array_equal(into, source)
    assert target.sum() == into.sum()  # Nothing was written beside it.


@pytest.mark.parametrize("line", [0, 24])
@pytest.mark.parametrize(("rows", "row_bytes", "step", "into_step"), SHAPES)
def test_rows_with_gaps_are_copied_and_hashed_as_one_text(
    engine, rows, row_bytes, step, into_step, line
):
    source = laid_out(rows, row_bytes, step, noise(rows * step + row_bytes))
    target = lines(rows * into_step + row_bytes, line)
    into = laid_out(rows, row_bytes, into_step, target)
    expected = xxhash.xxh3_64_intdigest(source.tobytes())
    assert engine.prepare([RowMove(source, into), RowMove(source, None)]).make() == [expected] * 2
    assert np.array_equal(into, source)
    assert target.sum() == into.sum()
    assert engine.prepare([RowMove(source[:, ::-1].copy(), into, is_hashed=False)]).make() == [0]
    assert np.array_equal(into, source[:, ::-1])


def test_moves_are_made_in_order_and_again_of_what_is_there_then(engine):
    first, second, target = (np.zeros((3, 700), np.uint8) for _ in range(3))
    there = [RowMove(first, second), RowMove(second, target[:, :700]), RowMove(first[:1, :9], None)]
    moves = engine.prepare(there)
    for content in (noise(2100), noise(2101)[1:]):
        first[:] = content.reshape(3, 700)
        whole, start = content.data, np.ascontiguousarray(content[:9]).data
        sums = [xxhash.xxh3_64_intdigest(part) for part in (whole, whole, start)]
        assert moves.make() == sums
        assert np.array_equal(target, first)


@pytest.mark.parametrize(("rows", "row_bytes", "step", "into_step"), SHAPES)
def test_another_process_is_read_as_memory_is(compiled, rows, row_bytes, step, into_step):
    del into_step
    content = noise(rows * step + row_bytes)
    source, into = laid_out(rows, row_bytes, step, content), np.zeros((rows, row_bytes), np.uint8)
    read = RowRead(content.ctypes.data, step, into)
    try:  # This process, as if it were another.
        (found,) = compiled.prepare_reads(os.getpid(), [read]).make()
    except PermissionError:
        skip_without("tracing")
    assert np.array_equal(into, source)
    assert found == xxhash.xxh3_64_intdigest(source.tobytes())


PIECES = {  # (where each begins, rows, bytes of a row, step)
    "side by side": [(i * 5000, 1, 5000, 5000) for i in range(400)],  # more than one call's worth
    "of a tensor cut by columns between others": [
        (0, 1, 4096, 4096), (4096, 8, 512, 1024), (12_288, 1, 700, 700), (13_056, 3, 64, 9000)
    ],
    "far apart": [(0, 1, 300, 300), (1 << 20, 9, 100, 20_000), (3 << 20, 1, 500, 500)],
    "backwards and over one another": [(5000, 1, 900, 900), (0, 4, 300, 400), (200, 1, 900, 900)],
    "large among small": [(0, 1, 10, 10), (64, 1, 3 << 20, 3 << 20), ((3 << 20) + 64, 1, 9, 9)],
}  # fmt: skip


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_pieces_of_another_process_come_each_to_its_place(compiled, pieces):
    content = noise(4 << 20)
    sources = [
        laid_out(rows, size, step, content[start:]).copy() for start, rows, size, step in pieces
    ]
    into = [lines(each.size, 9 * i % 64).reshape(each.shape) for i, each in enumerate(sources)]
    reads = [
        RowRead(content.ctypes.data + start, step, place)
        for (start, _, _, step), place in zip(pieces, into, strict=True)
    ]
    try:
        found = compiled.prepare_reads(os.getpid(), reads).make()
    except PermissionError:
        skip_without("tracing")
    assert all(map(np.array_equal, into, sources))
    assert found == [xxhash.xxh3_64_intdigest(source.tobytes()) for source in sources]


def test_what_lies_between_two_pieces_of_another_process_may_be_nothing(compiled):
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    content = np.frombuffer(memory, dtype=np.uint8)
    content[:] = np.resize(noise(5000), 3 * page)
    start = content.ctypes.data
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for allowed in (0, mmap.PROT_READ | mmap.PROT_WRITE):
        assert protect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), allowed) == 0
        into = np.zeros((2, page), np.uint8)
        reads = [RowRead(start + 2 * i * page, 1, into[i].reshape(-1, 1)) for i in range(2)]
        try:
            sums = compiled.prepare_reads(os.getpid(), reads).make()
        except PermissionError:
            skip_without("tracing")
        expected = [content[:page], content[2 * page :]]
        assert all(map(np.array_equal, into, expected))
        assert sums == [xxhash.xxh3_64_intdigest(part.tobytes()) for part in expected]


def test_memory_that_is_not_there_is_an_error_of_the_system(compiled):
    into = np.zeros((300_000, 1), np.uint8)
    with pytest.raises(OSError, match=r"address|permitted") as caught:
        compiled.prepare_reads(os.getpid(), [RowRead(4096, 1, into)]).make()
    assert caught.value.errno in {errno.EFAULT, errno.EPERM}


@pytest.fixture
def stream() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of one; the second waits half a minute for bytes."""
    ends = socket.socketpair()
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 30, 0))
    with ends[0], ends[1]:
        yield ends


def in_half_a_minute() -> float:
    return time.monotonic() + 30.0


@pytest.mark.parametrize(("rows", "row_bytes", "step", "into_step"), SHAPES)
def test_rows_cross_a_stream_and_are_hashed_on_arrival(
    compiled, stream, rows, row_bytes, step, into_step
):
    del into_step
    source = laid_out(rows, row_bytes, step, noise(rows * step + row_bytes))
    target = np.zeros(rows * row_bytes + 7, np.uint8)
    into = target[7:]
    state = compiled.start()
    half = into.size // 2  # Two messages, one text.
    with ThreadPoolExecutor(1) as pool:
        sending = compiled.prepare_send([source])
        sent = pool.submit(sending.make, stream[0].fileno(), in_half_a_minute())
        for part in (into[:half], into[half:]):
            compiled.receive(state, part, stream[1].fileno(), in_half_a_minute())
        sent.result()
    assert into.tobytes() == source.tobytes()
    assert not target[:7].any()
    if into.size >= 241:
        assert compiled.value(state) == xxhash.xxh3_64_intdigest(source.tobytes())


def test_what_is_larger_than_any_buffer_crosses_a_stream(compiled, stream):
    source = laid_out(3000, 3000, 3001, noise(3001 * 3000))
    into, state = np.zeros(source.size, np.uint8), compiled.start()
    with ThreadPoolExecutor(1) as pool:
        sending = compiled.prepare_send([source])
        sent = pool.submit(sending.make, stream[0].fileno(), in_half_a_minute())
        compiled.receive(state, into, stream[1].fileno(), in_half_a_minute())
        sent.result()
    assert compiled.value(state) == xxhash.xxh3_64_intdigest(source.tobytes())
    assert into.tobytes() == source.tobytes()


def test_many_cross_a_stream_in_one_call_and_again_in_the_next(compiled, stream):
    shapes = [*SHAPES, (2000, 300, 301, 300), (1, 700_000, 700_000, 700_000)]
    sources = [laid_out(r, size, step, noise(r * step + size)) for r, size, step, _ in shapes]
    sources = [each for each in sources if each.size >= SHORTEST_COMPILED]
    places = [np.zeros(each.size, np.uint8) for each in sources]
    sending, receiving = compiled.prepare_send(sources), compiled.prepare_receive(places)
    for _ in range(2):
        for each in places:
            each[:] = 0
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(sending.make, stream[0].fileno(), in_half_a_minute())
            sums = receiving.make(stream[1].fileno(), in_half_a_minute())
            sent.result()
        assert all(p.tobytes() == s.tobytes() for p, s in zip(places, sources, strict=True))
        assert sums == [xxhash.xxh3_64_intdigest(each.tobytes()) for each in sources]


def test_a_stream_that_ends_early_says_so(compiled, stream):
    stream[0].sendall(b"abc")
    stream[0].close()
    with pytest.raises(EOFError):
        compiled.receive(
            compiled.start(), np.zeros(4, np.uint8), stream[1].fileno(), in_half_a_minute()
        )


def test_nobody_waits_for_a_stream_beyond_the_limit(compiled, stream):
    stream[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 1000))
    stream[0].sendall(b"abc")
    with pytest.raises(BlockingIOError):
        compiled.receive(
            compiled.start(), np.zeros(4, np.uint8), stream[1].fileno(), time.monotonic()
        )


def test_of_many_the_first_that_does_not_come_ends_the_wait(compiled, stream):
    places = [np.zeros(300, np.uint8) for _ in range(3)]
    stream[0].sendall(bytes(range(200)) * 3)
    stream[0].close()
    with pytest.raises(EOFError):
        compiled.prepare_receive(places).make(stream[1].fileno(), in_half_a_minute())
    assert places[1].tobytes() == (bytes(range(200)) * 3)[300:]
    assert not places[2].any()


def test_a_peer_that_left_is_an_error_of_the_system(compiled, stream):
    stream[1].close()
    sending = compiled.prepare_send([np.zeros((1, 9), np.uint8)])
    with pytest.raises(BrokenPipeError):
        sending.make(stream[0].fileno(), in_half_a_minute())


def test_a_library_of_another_version_is_told_of_and_done_without(tmp_path):
    path = tmp_path / "_streaming.so"
    assert usable_rows(path) is None
    path.write_bytes(b"not a library")
    with pytest.warns(RuntimeWarning, match="install cosmos-weightsync again"):
        assert usable_rows(path) is None
