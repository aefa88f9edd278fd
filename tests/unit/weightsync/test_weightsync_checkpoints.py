"""A safetensors directory as a layout: from headers alone, and refused where it is not whole."""

import json
import struct
from pathlib import Path

import pytest
import torch
from capabilities import skip_without

from cosmos_weightsync import (
    Box,
    CorruptFileError,
    LayoutError,
    ShardSpec,
    checkpoint_shards,
    read_checkpoint,
)
from cosmos_weightsync.files.headers import encode_header

A = ("a", "float32", (2, 3))
B = ("b", "bfloat16", (4,))
C = ("c", "float8_e8m0fnu", (2, 0))


def write(path: Path, tensors, size: int | None = None) -> None:
    """A file of the right size that holds zeros."""
    header, entries = encode_header(tensors, {"format": "pt"})
    whole = len(header) + sum(entry.num_bytes for entry in entries)
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(whole if size is None else size)


def test_one_file_is_a_layout_of_one_rank(tmp_path):
    write(tmp_path / "model.safetensors", [A, B, C])
    layout = read_checkpoint(tmp_path).layout()
    assert layout.num_ranks == 1
    assert layout.specs_of(0) == (
        ShardSpec("a", (2, 3), Box.full((2, 3)), "float32"),
        ShardSpec("b", (4,), Box.full((4,)), "bfloat16"),
    )
    assert layout.shape_of("c") == (2, 0)


def test_a_file_can_be_named_instead_of_its_directory(tmp_path):
    write(tmp_path / "x.safetensors", [A])
    write(tmp_path / "y.safetensors", [B])
    assert list(read_checkpoint(tmp_path / "y.safetensors").tensors) == ["b"]
    assert list(read_checkpoint(tmp_path).tensors) == ["a", "b"]


def test_offsets_lead_to_the_bytes(tmp_path):
    text = (
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"__metadata__":{"k":"v"},'
        b'"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"none":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}'
    )
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0AB")
    found = read_checkpoint(tmp_path)
    assert list(found.tensors) == ["b", "none", "a"]
    stored = found.tensors["a"]
    assert (stored.file, stored.offset) == ("model.safetensors", 8 + len(text) + 1)


def test_the_index_says_which_files_count(tmp_path):
    write(tmp_path / "one.safetensors", [A])
    write(tmp_path / "two.safetensors", [B, A])  # The copy of "a" here is a leftover.
    write(tmp_path / "old.safetensors", [C])
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_checkpoint(tmp_path)
    assert {name: item.file for name, item in found.tensors.items()} == index["weight_map"]
    assert sorted(found.files) == ["one.safetensors", "two.safetensors"]
    assert found.num_bytes == 24 + 8


def test_no_tensor_is_read(tmp_path):
    write(tmp_path / "model.safetensors", [("w", "bfloat16", (1 << 20, 1 << 20))], size=None)
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 1 << 20  # A hole of 2 TB.
    assert read_checkpoint(tmp_path).num_bytes == 2 << 40


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        (4, "4 bytes are no safetensors file"),
        (20, "ends within its header"),
        (-1, r"b at \d+: it was truncated"),
    ],
)
def test_a_truncated_file_is_refused_by_name(tmp_path, size, complaint):
    file = tmp_path / "model.safetensors"
    write(file, [A, B])
    with file.open("r+b") as handle:
        handle.truncate(size if size >= 0 else file.stat().st_size + size)
    with pytest.raises(CorruptFileError, match=rf"model\.safetensors: .*{complaint}"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"not json at all",
        b"[1, 2, 3]",
        b'{"a":{"dtype":"U8","shape":[2]}}',
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,3]}}',
        b'{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,-2]}}',
        b'{"a":{"dtype":"U8","shape":["x"],"data_offsets":[0,2]}}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_damaged_header_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 9)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "size", "complaint"),
    [
        ([(0, 2), (1, 3)], 3, "b begins at byte 1 and overlaps a, which ends at 2"),
        ([(0, 2), (0, 2)], 2, "begins at byte 0 and overlaps"),
        ([(0, 2), (3, 5)], 5, "b begins at byte 3 and leaves a hole behind a, which ends at 2"),
        ([(1, 3)], 3, "a begins at byte 1 and leaves a hole behind the header"),
        ([(0, 2), (2, 4)], 9, r"no tensor has the bytes from \d+ on"),
    ],
)
def test_tensors_that_do_not_lie_one_after_the_other_are_refused(
    tmp_path, offsets, size, complaint
):
    """As the format's own reader does: a sender of such a file would send what nobody wrote."""
    entry = {"dtype": "U8", "shape": [2]}
    places = zip("ab", offsets, strict=False)
    text = json.dumps({name: {**entry, "data_offsets": place} for name, place in places}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * size)
    with pytest.raises(CorruptFileError, match=rf"model\.safetensors: .*{complaint}"):
        read_checkpoint(tmp_path)


def test_an_unknown_dtype_is_refused_by_tensor(tmp_path):
    text = b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0\0")
    with pytest.raises(LayoutError, match="a has dtype 'F6_E2M3'"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "complaint"),
    [
        ({"a": "gone.safetensors"}, "names gone.safetensors, which is not there"),
        ({"z": "one.safetensors"}, "places z in one.safetensors, which does not hold it"),
        ({"a": "one.safetensors", "z": None}, "not an index: .*`str`, got `null`"),
        ({"a": ["one.safetensors"]}, "not an index: .*`str`, got `array`"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(tmp_path, weight_map, complaint):
    write(tmp_path / "one.safetensors", [A])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptFileError, match=complaint):
        read_checkpoint(tmp_path)


def test_the_same_tensor_twice_without_an_index_is_refused(tmp_path):
    write(tmp_path / "one.safetensors", [A])
    write(tmp_path / "two.safetensors", [A])
    with pytest.raises(LayoutError, match=r"a is in one.safetensors and in two.safetensors"):
        read_checkpoint(tmp_path)


def test_a_directory_without_safetensors_is_refused(tmp_path):
    with pytest.raises(LayoutError, match=r"no \.safetensors file"):
        read_checkpoint(tmp_path)


DTYPES = [
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
    "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint8", "bool",
    "uint16", "uint32", "uint64", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_found_as_the_safetensors_library_wrote_it(tmp_path, dtype):
    library = pytest.importorskip("safetensors.torch")
    tensor = torch.zeros(2, 4, dtype=torch.uint8).view(-1)
    width = getattr(torch, dtype).itemsize
    tensor = torch.zeros(2 * 4 * width, dtype=torch.uint8).view(getattr(torch, dtype)).view(2, 4)
    try:
        library.save_file({"w": tensor}, tmp_path / "model.safetensors")
    except KeyError:
        skip_without("packages", f"this safetensors cannot write {dtype}")
    assert read_checkpoint(tmp_path).tensors["w"].spec == ShardSpec(
        "w", (2, 4), Box.full((2, 4)), dtype
    )


@pytest.mark.parametrize("pad", [0, 1])
def test_a_checkpoint_is_mapped_and_sent_as_it_is(tmp_path, pad):
    text = b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}' + b" " * pad
    values = struct.pack("<4f", 1, 2, 3, 4)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + values)
    (shard,) = checkpoint_shards(tmp_path)
    assert shard.tensor.tolist() == [[1, 2], [3, 4]]
    shard.tensor.fill_(0)
    assert file.read_bytes().endswith(values)
