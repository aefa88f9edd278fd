"""Lists of changes: bit for bit, at any density, and typed errors for anything else."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_weightsync import ProtocolError
from cosmos_weightsync.encodings.changes import (
    WORK_PER_BYTE,
    ChangeDecoder,
    ChangeEncoder,
    Dense,
    Same,
    Sparse,
)


def as_bytes(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)


def record(new: np.ndarray, base: np.ndarray, item_bytes: int) -> np.ndarray:
    parts = ChangeEncoder().encode(new, base, item_bytes)
    return np.frombuffer(b"".join(bytes(part) for part in parts), np.uint8)


def applied(stream: np.ndarray, base: np.ndarray, item_bytes: int) -> np.ndarray:
    numel = len(base) // item_bytes
    change, end = ChangeDecoder().decode(stream, 0, numel, item_bytes)
    assert end == len(stream)
    found = base.copy()
    if isinstance(change, Dense):
        found[:] = change.content
    if isinstance(change, Sparse):
        rows = change.values.reshape(-1, item_bytes)
        found.reshape(-1, item_bytes)[change.positions] = rows
    return found


@settings(max_examples=60, deadline=None)
@given(
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    numel=st.integers(1, 5000),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_the_base_and_its_changes_are_the_new_bytes(item_bytes, numel, share, seed):
    chance = np.random.default_rng(seed)
    base = chance.integers(0, 256, numel * item_bytes, np.uint8)
    new = base.copy()
    where = np.flatnonzero(chance.random(numel) < share)
    new.reshape(-1, item_bytes)[where] = chance.integers(0, 256, (len(where), item_bytes), np.uint8)
    stream = record(new, base, item_bytes)
    once = applied(stream, base, item_bytes)
    assert once.tobytes() == new.tobytes()
    assert applied(stream, once, item_bytes).tobytes() == new.tobytes()
    assert len(stream) <= len(new) + 14


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 65_534, 65_535, 65_536, 200_000])
@pytest.mark.parametrize("crowd", [2, 20_000], ids=["two bytes per gap", "one byte per gap"])
def test_gaps_beyond_what_fits_are_skipped_in_steps(gap, crowd):
    base = np.zeros(crowd + gap + 1, np.uint16)
    new = base.copy()
    new[:crowd], new[-1] = 7, 8  # `gap` unchanged elements lie between.
    stream = record(as_bytes(new), as_bytes(base), 2)
    assert applied(stream, as_bytes(base), 2).tobytes() == new.tobytes()


def test_bits_are_compared_and_not_numbers():
    nan, other_nan = 0x7FC0, 0x7FC1
    base = np.array([nan, nan, 0x0000, 0x8000, *[0] * 60], np.uint16)
    new = np.array([nan, other_nan, 0x8000, 0x0000, *[0] * 60], np.uint16)
    change, _ = ChangeDecoder().decode(record(as_bytes(new), as_bytes(base), 2), 0, 64, 2)
    assert isinstance(change, Sparse)
    assert change.positions.tolist() == [1, 2, 3]
    assert change.values.view(np.uint16).tolist() == [other_nan, 0x8000, 0x0000]


def test_each_density_takes_the_shortest_form():
    chance = np.random.default_rng(0)
    base = chance.integers(0, 65_536, 100_000, np.uint16)
    kinds, sizes = [], []
    for share in (0.0, 0.01, 0.9):
        new = base.copy()
        where = chance.random(len(base)) < share
        new[where] = chance.integers(0, 65_536, int(where.sum()), np.uint16)
        stream = record(as_bytes(new), as_bytes(base), 2)
        kinds.append(type(ChangeDecoder().decode(stream, 0, len(base), 2)[0]))
        sizes.append(len(stream) / base.nbytes)
    assert kinds == [Same, Sparse, Dense]
    assert sizes[0] < 0.0001
    assert sizes[1] < 0.02  # 1 % of values, and a byte or so for each gap.
    assert sizes[2] < 1.0001


def sparse_record() -> tuple[np.ndarray, np.ndarray]:
    base = np.arange(4000, dtype=np.uint16)
    new = base.copy()
    new[::97] += 1
    return record(as_bytes(new), as_bytes(base), 2), as_bytes(base)


def test_a_truncated_record_is_refused():
    stream, base = sparse_record()
    for length in range(len(stream)):
        with pytest.raises(ProtocolError):
            ChangeDecoder().decode(stream[:length], 0, len(base) // 2, 2)


def test_a_damaged_record_is_refused_or_stays_inside_the_chunk():
    stream, base = sparse_record()
    refused = 0
    for index in range(len(stream)):
        for bit in (0, 3, 7):
            damaged = stream.copy()
            damaged[index] ^= 1 << bit
            try:
                change, _ = ChangeDecoder().decode(damaged, 0, len(base) // 2, 2)
            except ProtocolError:
                refused += 1
                continue
            if isinstance(change, Sparse):  # The frame's checksum is what finds these.
                assert change.positions.max() < len(base) // 2
                assert len(change.values) == 2 * len(change.positions)
    assert refused > 100


def test_a_record_of_another_chunk_is_refused():
    stream, base = sparse_record()
    with pytest.raises(ProtocolError, match="lists 42"):
        ChangeDecoder().decode(stream, 0, 100, 2)
    same = np.zeros(14, np.uint8)
    same[0] = 9
    with pytest.raises(ProtocolError, match="kind 9 does not fit 2000"):
        ChangeDecoder().decode(same, 0, len(base) // 4, 2)


def with_peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and the most bytes that it had allocated at a time."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.06, 0.19, 0.32, 0.49, 1.0])
@pytest.mark.parametrize("is_crowded", [False, True])
def test_what_either_side_takes_for_a_chunk_is_bounded(item_bytes, share, is_crowded):
    chance = np.random.default_rng(3)
    numel = (1 << 18) // item_bytes
    base = chance.integers(0, 256, numel * item_bytes, np.uint8)
    new = base.copy()
    found = np.arange(int(share * numel)) if is_crowded else chance.random(numel) < share
    new.reshape(-1, item_bytes)[found] ^= 255
    stream, encoded = with_peak(lambda: record(new, base, item_bytes))
    _, decoded = with_peak(lambda: ChangeDecoder().decode(stream, 0, numel, item_bytes))
    # The chunk's copies of both versions, where its rows have gaps, come on top.
    assert encoded <= (WORK_PER_BYTE - 2) * len(new)
    # So do torch's wide positions, once the rest is gone.
    assert decoded <= (WORK_PER_BYTE - 4) * len(new)
