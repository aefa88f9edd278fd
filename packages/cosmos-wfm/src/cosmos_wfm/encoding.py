"""Samples as training has them, latents and embedded prompts, computed each time or kept on disk.

<cache>/<model and preprocessing>/<first two>/<sample>.safetensors

A file holds one sample's latents and the rows of its embedded prompt. Its name is a hash of what
the sample is made of; another model or another size has another directory. Files appear whole, so
that a killed run leaves no half of one, ranks and runs share a directory, and what is missing or
broken is computed again.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable
from uuid import uuid4

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cosmos_parallel import save_tensors
from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition, device_of
from cosmos_wfm.caption_data import CaptionData, CaptionedImage
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.training_data import DataConfig

_LATENTS = "latents"
_TEXT = "text."
_SAMPLED_BLOCKS, _BLOCK_BYTES = 256, 1 << 12
_READING = b"upright, of 16 bits too, on white, in BT.709 and sRGB by profiles"
"""Another one for each change of how files become pixels, so that old samples are encoded anew."""
_NOT_PIXELS = {"path", "index", "lanes", "broken"}


class EncodedSample(NamedTuple):
    """One sample: normalised latents, and the row of each part of its embedded prompt."""

    latents: Float[Tensor, "C ..."]
    text: TextCondition


@runtime_checkable
class TrainsText(Protocol):
    """An adapter that may be training a part of its text embedding."""

    @property
    def trains_text(self) -> bool:
        """Whether ``encode_text`` leaves out a part because it is trained."""
        ...


class EncodedCache:
    """Encoded samples of one model and preprocessing, in files."""

    def __init__(self, directory: Path, key: str) -> None:
        """Make the directory.

        Args:
            directory: of all models and sizes.
            key: of this model and size.

        Raises:
            WfmConfigError: if it cannot be made.
        """
        self._directory = directory / key
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WfmConfigError(f"cache: {directory} cannot be made: {error.strerror}") from error

    def load(self, identity: str) -> tuple[EncodedSample, str] | None:
        """Return a sample and its prompt; ``None`` if there is no readable file of it."""
        path = self._path(identity)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                prompt: str = (file.metadata() or {})["prompt"]
        except (SafetensorError, KeyError, OSError):
            return None
        latents = tensors.pop(_LATENTS)
        text = {name.removeprefix(_TEXT): value for name, value in tensors.items()}
        return EncodedSample(latents, text), prompt

    def save(self, identity: str, sample: EncodedSample, prompt: str) -> None:
        """Write a sample; the file appears whole.

        Raises:
            WfmConfigError: if it cannot be written, as on a full disk.
        """
        path = self._path(identity)
        tensors = {_LATENTS: sample.latents, **{_TEXT + k: v for k, v in sample.text.items()}}
        # no number of a process: those of ranks on several nodes are alike
        partial = path.with_suffix(f".{uuid4().hex}.partial")
        whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(whole, partial, {"prompt": prompt, "sample": identity})
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise WfmConfigError(
                f"cache: {self._directory} cannot be written: {error.strerror or error}; make "
                "room, name another directory, or leave cache empty, which encodes each time"
            ) from error

    def _path(self, identity: str) -> Path:
        name = hashlib.sha256(identity.encode()).hexdigest()[:40]
        return self._directory / name[:2] / f"{name}.safetensors"


class SampleEncoder:
    """Encodes samples of a data set, or finds them in a cache; every rank has its own.

    Attributes:
        adapter: the model.
        data: the samples.
        num_encoded: samples whose pixels were encoded so far.
    """

    def __init__(
        self,
        adapter: DiffusionModelAdapter,
        data: CaptionData,
        *,
        batch_size: int = 1,
        cache: EncodedCache | None = None,
    ) -> None:
        """Take a model and its data; nothing is encoded yet.

        Args:
            adapter: the model, its tuning prepared.
            data: captioned samples.
            batch_size: samples that are encoded at once, if they have one size.
            cache: where to look first, and to put what is not there.
        """
        self.adapter = adapter
        self.data = data
        self.num_encoded = 0
        self._batch_size = batch_size
        self._cache = cache
        self._dropped: TextCondition | None = None

    def rows(self, indices: Sequence[int]) -> list[EncodedSample]:
        """Return samples by number.

        Raises:
            CaptionDataError: if one is broken and that is fatal.
        """
        found: dict[int, EncodedSample] = {}
        missing: list[int] = []
        for index in dict.fromkeys(indices):
            kept = self._kept(index)
            if kept is None:
                missing.append(index)
            else:
                found[index] = kept
        samples = [(index, self.data[index]) for index in missing]
        for part in _of_one_shape(samples, self._batch_size):
            found.update(self._encoded(part))
        return [found[index] for index in indices]

    def dropped(self) -> TextCondition:
        """Return the one row that a dropped prompt is trained with."""
        if self._dropped is None:
            self._dropped = self.adapter.encode_dropped(1)
        return self._dropped

    @property
    def _trains_text(self) -> bool:
        return isinstance(self.adapter, TrainsText) and self.adapter.trains_text

    def _kept(self, index: int) -> EncodedSample | None:
        kept = self._cache.load(self.data.identity(index)) if self._cache else None
        if kept is None:
            return None
        (latents, text), prompt = kept
        device = device_of(self.adapter.transformer)
        if self._trains_text or not text:
            [text] = _rows(self.adapter.encode_text([prompt]), 1)
        return EncodedSample(latents.to(device), {k: v.to(device) for k, v in text.items()})

    def _encoded(
        self, samples: Sequence[tuple[int, CaptionedImage]]
    ) -> Iterator[tuple[int, EncodedSample]]:
        encoded = encode_samples(self.adapter, [sample for _, sample in samples])
        self.num_encoded += len(samples)
        for (index, sample), row in zip(samples, encoded, strict=True):
            # another one in the place of a broken one is not kept: what is broken stays named
            if self._cache is not None and index not in self.data.problems.broken:
                kept = EncodedSample(row.latents, {}) if self._trains_text else row
                self._cache.save(self.data.identity(index), kept, sample.prompt)
            yield index, row


def encode_samples(
    adapter: DiffusionModelAdapter, samples: Sequence[CaptionedImage]
) -> list[EncodedSample]:
    """Encode samples whose pixels have one size."""
    latents = adapter.encode_pixels(torch.stack([sample.pixels for sample in samples]))
    text = _rows(adapter.encode_text([sample.prompt for sample in samples]), len(samples))
    return [EncodedSample(*pair) for pair in zip(latents.unbind(), text, strict=True)]


def cache_key(model: Path, data: DataConfig, *, adapter: str) -> str:
    """Return a name for all that an encoded sample depends on but the sample itself.

    Weights are told apart by a mebibyte of each file, its length and its name, since reading a
    whole text encoder takes longer than it saves. That mebibyte is taken from all over the file:
    what was tuned often has the old header and token embeddings in front.

    Args:
        model: a pipeline directory.
        data: how pixels are made.
        adapter: the adapter's class.
    """
    digest = hashlib.sha256(adapter.encode() + _READING)
    pixels = {name: value for name, value in asdict(data).items() if name not in _NOT_PIXELS}
    digest.update(json.dumps(pixels, sort_keys=True).encode())
    for path in _model_files(model):
        digest.update(f"{path.relative_to(model)} {path.stat().st_size}\n".encode())
        for block in _sampled(path):
            digest.update(block)
    return digest.hexdigest()[:32]


def _model_files(model: Path) -> list[Path]:
    """Return the files of a pipeline directory; parts of it may be links, as to a shared encoder.

    ``rglob`` goes into no link but where it begins.
    """
    links = (path for path in model.iterdir() if path.is_symlink() and path.is_dir())
    return sorted({p for root in (model, *links) for p in root.rglob("*") if p.is_file()})


def _sampled(path: Path) -> Iterator[bytes]:
    """Yield blocks of a file, evenly spaced from its first byte to its last."""
    last = max(path.stat().st_size - _BLOCK_BYTES, 0)
    with path.open("rb") as file:
        for start in sorted({last * n // (_SAMPLED_BLOCKS - 1) for n in range(_SAMPLED_BLOCKS)}):
            file.seek(start)
            yield file.read(_BLOCK_BYTES)


def _of_one_shape(
    samples: Sequence[tuple[int, CaptionedImage]], most: int
) -> Iterator[list[tuple[int, CaptionedImage]]]:
    """Yield samples in parts of one size of pixels, in order of their first."""
    shapes: dict[torch.Size, list[tuple[int, CaptionedImage]]] = {}
    for index, sample in samples:
        shapes.setdefault(sample.pixels.shape, []).append((index, sample))
    for group in shapes.values():
        for start in range(0, len(group), most):
            yield group[start : start + most]


def _rows(text: TextCondition, num: int) -> list[TextCondition]:
    return [{name: values[row] for name, values in text.items()} for row in range(num)]
