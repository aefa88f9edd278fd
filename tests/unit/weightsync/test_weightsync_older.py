"""A version that an earlier release left in files is read, and no file beside it.

``older/version-format-1.tar.xz`` was published by 1291958, of 2026-11-24.
"""

import re
import tarfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from cosmos_weightsync import CorruptFileError, FileReceiver
from cosmos_weightsync.files.manifests import Manifest

PUBLISHED = {
    "embed": torch.arange(12.0).reshape(3, 4),
    "bias": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "steps": torch.arange(5),
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "older" / "version-format-1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_version_of_format_1_is_read(published):
    receiver = FileReceiver(published)
    assert receiver.stage().version == 7
    found = {shard.spec.name: shard.tensor for shard in receiver.staged_shards()}
    assert found.keys() == PUBLISHED.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in PUBLISHED.items())


def test_a_later_format_says_what_to_do(published):
    manifest = published / "v00000007" / "manifest.json"
    outer = msgspec.json.decode(manifest.read_bytes())
    later = msgspec.json.encode({**outer, "format": "later"})
    with pytest.raises(CorruptFileError, match=r"format 'later', .* or have it published again"):
        Manifest.decode(later, str(manifest))


@pytest.mark.parametrize("place", ["../v00000006/model.safetensors", "/etc/passwd", ".."])
@pytest.mark.parametrize("is_listed", [False, True])
def test_no_box_lies_outside_of_the_directory(published, place, is_listed):
    content = (published / "v00000007" / "manifest.json").read_bytes()
    whole = Manifest.decode(content, "manifest.json")
    files = {place: 318} if is_listed else whole.files
    moved = [replace(box, stored=replace(box.stored, file=place)) for box in whole.boxes]
    changed = Manifest.of(whole.version, files, moved).encode()
    with pytest.raises(CorruptFileError, match=f"manifest.json: '{re.escape(place)}' is no file"):
        Manifest.decode(changed, "manifest.json")
