"""What a version directory holds, box by box, with a checksum of every chunk of every box.

The manifest is the commit of a version: a directory without one is no version. Needs no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import CorruptFileError, DigestError, LayoutError, StorageError
from cosmos_weightsync.files.checkpoints import StoredTensor, read_whole
from cosmos_weightsync.files.storage import Storage
from cosmos_weightsync.layout import Layout, ShardSpec

__all__ = [
    "CHUNK_BYTES",
    "MANIFEST_NAME",
    "Manifest",
    "StoredBox",
    "committed_versions",
    "read_checked",
    "read_manifest",
    "stored_name",
    "version_name",
]

MANIFEST_NAME = "manifest.json"
CHUNK_BYTES = 1 << 20
_FORMAT = "cosmos-weightsync/1"


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor in a file, and the xxh3_64 of each `CHUNK_BYTES` of its bytes."""

    stored: StoredTensor
    sums: tuple[int, ...]

    def to_json(self) -> list[Any]:
        """Plain lists."""
        spec = self.stored.spec
        hexadecimal = "".join(f"{value:016x}" for value in self.sums)
        corners = [list(spec.global_shape), list(spec.box.start), list(spec.box.stop)]
        return [spec.name, spec.dtype, *corners, self.stored.file, self.stored.offset, hexadecimal]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> "StoredBox":
        """The inverse of `to_json`."""
        name, dtype, shape, start, stop, file, offset, text = row
        spec = ShardSpec(str(name), tuple(shape), Box(tuple(start), tuple(stop)), str(dtype))
        sums = tuple(int(text[low : low + 16], 16) for low in range(0, len(text), 16))
        if len(sums) != -(-spec.num_bytes // CHUNK_BYTES):
            raise ValueError(f"{name} has {len(sums)} checksums")
        return cls(StoredTensor(spec, str(file), int(offset)), sums)


@dataclass(frozen=True, eq=False, slots=True)
class Manifest:
    """All of a version.

    Attributes:
        version: Its number.
        files: Bytes of every file.
        boxes: What they hold.
        digest: Equal for equal names, boxes and bytes.
    """

    version: int
    files: Mapping[str, int]
    boxes: tuple[StoredBox, ...]
    digest: str

    @classmethod
    def of(cls, version: int, files: Mapping[str, int], boxes: Iterable[StoredBox]) -> "Manifest":
        """Count up the digest."""
        boxes = tuple(boxes)
        state = xxhash.xxh3_64()
        for box in sorted(boxes, key=lambda item: (item.stored.spec.name, item.stored.spec.box)):
            spec = box.stored.spec
            state.update(f"{spec.name} {spec.dtype} {spec.global_shape} {spec.box}".encode())
            state.update(",".join(map(str, box.sums)).encode())
        return cls(version, dict(files), boxes, f"{state.intdigest():016x}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all boxes."""
        return sum(box.stored.spec.num_bytes for box in self.boxes)

    def layout(self) -> Layout:
        """Every file as a rank, in the order of `files`."""
        ranks: dict[str, list[ShardSpec]] = {file: [] for file in self.files}
        for box in self.boxes:
            ranks[box.stored.file].append(box.stored.spec)
        return Layout.from_ranks(list(ranks.values()))

    def encode(self) -> bytes:
        """The content of the manifest's file; it carries a checksum of itself."""
        body = {
            "version": self.version,
            "digest": self.digest,
            "files": dict(self.files),
            "boxes": [box.to_json() for box in self.boxes],
        }
        return msgspec.json.encode({"format": _FORMAT, "xxh3": _sum_of(body), "body": body})

    @classmethod
    def decode(cls, content: bytes, where: str) -> "Manifest":
        """The inverse of `encode`.

        Raises:
            CorruptFileError: it is damaged, of another format, or places boxes elsewhere than in
                files of its directory.
        """
        try:
            outer = msgspec.json.decode(content)
            body = outer["body"]
            if outer["format"] != _FORMAT:
                raise CorruptFileError(
                    f"{where}: format {outer['format']!r}, and this version reads {_FORMAT!r}: "
                    "read it with the version that wrote it, or have it published again"
                )
            if outer["xxh3"] != _sum_of(body):
                raise CorruptFileError(f"{where}: its checksum is not its own: it is damaged")
            files = {str(name): int(size) for name, size in body["files"].items()}
            boxes = [StoredBox.from_json(row) for row in body["boxes"]]
            _check_places(files, boxes, where)
            found = cls.of(int(body["version"]), files, boxes)
        except (msgspec.DecodeError, LayoutError, KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"{where}: not a manifest: {error!r}") from error
        return found


def _check_places(files: Iterable[str], boxes: Iterable[StoredBox], where: str) -> None:
    """Refuse files that are not in the manifest's own directory, and boxes in none of its files."""
    outside = [name for name in files if "/" in name or name in {"", ".", ".."}]
    outside += [box.stored.file for box in boxes if box.stored.file not in files]
    if outside:
        raise CorruptFileError(f"{where}: {outside[0]!r} is no file of this directory")


def _sum_of(body: Any) -> str:
    return f"{xxhash.xxh3_64(msgspec.json.encode(body)).intdigest():016x}"


def stored_name(spec: ShardSpec) -> str:
    """A whole tensor keeps its name, so that any reader finds it; a part says which it is."""
    is_whole = spec.box == Box.full(spec.global_shape)
    return spec.name if is_whole else f"{spec.name}@{spec.box}"


def version_name(version: int) -> str:
    """The directory of a version."""
    return f"v{version:08d}"


def committed_versions(storage: Storage) -> list[int]:
    """All versions that are whole, oldest first."""
    found: list[int] = []
    for name in storage.names():
        is_version = name.startswith("v") and name[1:].isdecimal()
        if is_version and storage.size(f"{name}/{MANIFEST_NAME}") is not None:
            found.append(int(name[1:]))
    return sorted(found)


def _first_lost(boxes: Iterable[StoredBox], file: str, num_bytes: int) -> str:
    """What begins or goes on behind the first bytes of a file."""
    lost = (
        box.stored
        for box in boxes
        if box.stored.file == file and box.stored.offset + box.stored.spec.num_bytes > num_bytes
    )
    stored = min(lost, key=lambda item: item.offset, default=None)
    return "nothing" if stored is None else f"{stored.spec.name} {stored.spec.box}"


def read_manifest(storage: Storage, directory: str = "") -> Manifest:
    """The manifest of a directory; the files it names must be there in their sizes.

    Raises:
        CorruptFileError: it is damaged, or a file is missing or truncated.
        StorageError: there is none.
    """
    path = f"{directory}/{MANIFEST_NAME}".lstrip("/")
    if storage.size(path) is None:
        raise StorageError(f"{storage.url}/{path}: there is no such version")
    manifest = Manifest.decode(read_whole(storage, path), f"{storage.url}/{path}")
    for file, size in manifest.files.items():
        found = storage.size(f"{directory}/{file}".lstrip("/"))
        if found != size:
            raise CorruptFileError(
                f"{storage.url}/{directory}/{file}: "
                + ("is missing" if found is None else f"{found} bytes, not {size}")
                + f"; {_first_lost(manifest.boxes, file, found or 0)} is lost"
            )
    return manifest


def read_checked(
    storage: Storage, directory: str, source: StoredBox, low: int, view: memoryview
) -> None:
    """Read whole chunks of a stored box and compare them with their checksums.

    Args:
        storage: Where the files are.
        directory: In which directory.
        source: The box.
        low: The first byte of it to read, a multiple of `CHUNK_BYTES`.
        view: Filled with the bytes from there on, up to the end of a chunk or of the box.

    Raises:
        DigestError: a chunk is not what was written.
        StorageError: the file cannot be read.
    """
    stored = source.stored
    path = f"{directory}/{stored.file}".lstrip("/")
    storage.read_into(path, stored.offset + low, view)
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        found, written = xxhash.xxh3_64_intdigest(chunk), source.sums[(low + start) // CHUNK_BYTES]
        if found != written:
            raise DigestError(
                f"{storage.url}/{path}: {stored.spec.name} {stored.spec.box}, bytes "
                f"{low + start}:{low + start + len(chunk)} of it, are damaged: checksum "
                f"{found:016x}, written was {written:016x}"
            )
