"""Weights in 8 or 4 bits with a scale per block, in the names, shapes and dtypes engines load.

| encoding | values | scales | loaded by vLLM as |
|---|---|---|---|
| `RowwiseFp8` | e4m3 | ``weight_scale`` float32 [m, 1] | compressed-tensors, channel |
| `BlockFp8` | e4m3 | ``weight_scale_inv`` float32 [m/128, n/128] | ``fp8``, ``weight_block_size`` |
| `MxFp8` | e4m3 | ``weight_scale`` e8m0 as uint8 [m, n/32] | ModelOpt MXFP8 |
| `NvFp4` | e2m1, packed | ``weight_scale`` e4m3 [m, n/16], ``weight_scale_2`` float32 | ModelOpt |

In all of them ``values * scale`` is the weight again. Leading dims (experts) are kept, and every
index of theirs is quantised for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.encodings.blocks import bands, grid_box, grid_shape, padded_blocks, unpadded
from cosmos_weightsync.encodings.contract import Extents
from cosmos_weightsync.errors import EncodingError
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import Shard

__all__ = ["BlockFp8", "MxFp8", "NvFp4", "RowwiseFp8", "powers_of_two"]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_FLOAT32_TINY = torch.finfo(torch.float32).tiny
_E4M3_SMALLEST = 2.0**-9
_QUANTISABLE = frozenset({"bfloat16", "float16", "float32", "float64"})
# Midpoints between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6. A tie goes to the even code.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowwiseFp8:
    """FP8 (e4m3) with one float32 scale per row: ``scale = max |row| / 448``.

    Attributes:
        names: Patterns of the tensors' names.
        scale_suffix: What follows a tensor's name in the name of its scales.
    """

    names: tuple[str, ...]
    scale_suffix: str = "_scale"
    kind: Literal["fp8_rowwise"] = "fp8_rowwise"

    def published(self, spec: ShardSpec) -> tuple[ShardSpec, ...]:
        """Values of the same shape, and a column of scales."""
        return _values_and_scales(spec, self.blocks(spec)[0], self.scale_suffix, "float32")

    def blocks(self, spec: ShardSpec) -> tuple[Extents, ...]:
        """Whole rows."""
        return (_block(spec, 1, max((1, *spec.global_shape[-1:]))),)

    def together(self, spec: ShardSpec) -> tuple[str, ...]:
        """Nobody shares them."""
        del spec
        return ("",)

    def write(self, shard: Shard, maxima: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """See `Encoding.write`."""
        _write_fp8(shard, self.blocks(shard.spec)[0], _linear_scales(maxima[0]), into)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFp8:
    """FP8 (e4m3) with one float32 scale per square block, as in DeepSeek-V3's checkpoints.

    Attributes:
        names: Patterns of the tensors' names.
        block: Side of a block; blocks at the end may be ragged.
        scale_suffix: What follows a tensor's name in the name of its scales.
    """

    names: tuple[str, ...]
    block: int = 128
    scale_suffix: str = "_scale_inv"
    kind: Literal["fp8_block"] = "fp8_block"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise EncodingError(f"a block of {self.block} x {self.block} holds nothing")

    def published(self, spec: ShardSpec) -> tuple[ShardSpec, ...]:
        """Values of the same shape, and a grid of scales."""
        return _values_and_scales(spec, self.blocks(spec)[0], self.scale_suffix, "float32")

    def blocks(self, spec: ShardSpec) -> tuple[Extents, ...]:
        """Squares."""
        return (_block(spec, self.block, self.block),)

    def together(self, spec: ShardSpec) -> tuple[str, ...]:
        """Nobody shares them."""
        del spec
        return ("",)

    def write(self, shard: Shard, maxima: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """See `Encoding.write`."""
        _write_fp8(shard, self.blocks(shard.spec)[0], _linear_scales(maxima[0]), into)


@dataclass(frozen=True, kw_only=True, slots=True)
class MxFp8:
    """MXFP8: e4m3 values in runs of 32, each with a power of two as scale (OCP MX 1.0).

    The scale is the smallest power of two with which no value saturates, as cuBLAS and vLLM
    round it; its exponent plus 127 is stored.

    Attributes:
        names: Patterns of the tensors' names.
        scale_suffix: What follows a tensor's name in the name of its scales.
    """

    names: tuple[str, ...]
    scale_suffix: str = "_scale"
    kind: Literal["mxfp8"] = "mxfp8"

    def published(self, spec: ShardSpec) -> tuple[ShardSpec, ...]:
        """Values of the same shape, and a scale for every 32 of them."""
        return _values_and_scales(spec, self.blocks(spec)[0], self.scale_suffix, "uint8")

    def blocks(self, spec: ShardSpec) -> tuple[Extents, ...]:
        """Runs of 32 along the last dim."""
        return (_block(spec, 1, 32),)

    def together(self, spec: ShardSpec) -> tuple[str, ...]:
        """Nobody shares them."""
        del spec
        return ("",)

    def write(self, shard: Shard, maxima: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """See `Encoding.write`."""
        # max <= 448 * 2**k = 0.875 * 2**(k + 9), and frexp gives max = mantissa * 2**exponent.
        mantissa, exponent = torch.frexp(maxima[0])
        power = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8)
        code = torch.where(maxima[0] > 0, power + 127, 0).clamp(0, 254)
        scales = powers_of_two(code)
        values, stored = into
        _write_fp8(shard, self.blocks(shard.spec)[0], scales, [values])
        stored.copy_(code.to(torch.uint8), non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class NvFp4:
    """NVFP4: e2m1 values in runs of 16 with an e4m3 scale each, and a float32 scale per matrix.

    ``weight = value * scale * scale_2``. Two values share a byte, the first in its low half, so
    the tensor is uint8 and half as wide. The scale per matrix needs the maximum of the whole
    matrix: a sharded one cannot do without an `AmaxGroup`.

    Attributes:
        names: Patterns of the tensors' names.
        fused: Parts of names that an engine fuses into one layer, which has one scale per matrix:
            ``("gate_proj", "up_proj")`` gives the tensors whose names differ in that part alone
            the scale of the larger one. vLLM takes the largest of different scales for all.
        scale_suffix: What follows a tensor's name in the name of the scales of its blocks.
        matrix_scale_suffix: The same for the scale per matrix.
    """

    names: tuple[str, ...]
    fused: tuple[tuple[str, ...], ...] = ()
    scale_suffix: str = "_scale"
    matrix_scale_suffix: str = "_scale_2"
    kind: Literal["nvfp4"] = "nvfp4"

    def published(self, spec: ShardSpec) -> tuple[ShardSpec, ...]:
        """Bytes of half the width, scales of the blocks, the scale per matrix."""
        run, matrix = self.blocks(spec)
        *lead, width = spec.global_shape
        if width % 2 or spec.box.start[-1] % 2 or spec.box.stop[-1] % 2:
            raise EncodingError(
                f"{spec.name} {spec.box} of {spec.global_shape}: two values share a byte, so "
                "width and shards must be even"
            )
        halved = Box(
            (*spec.box.start[:-1], spec.box.start[-1] // 2),
            (*spec.box.stop[:-1], spec.box.stop[-1] // 2),
        )
        packed = ShardSpec(spec.name, (*lead, width // 2), halved, "uint8")
        _, scales = _values_and_scales(spec, run, self.scale_suffix, "float8_e4m3fn")
        cells = grid_box(spec.box, matrix)
        per_matrix = ShardSpec(
            spec.name + self.matrix_scale_suffix,
            spec.global_shape[:-2],
            Box(cells.start[:-2], cells.stop[:-2]),
            "float32",
        )
        return packed, scales, per_matrix

    def blocks(self, spec: ShardSpec) -> tuple[Extents, ...]:
        """Runs of 16 along the last dim, and whole matrices."""
        runs = _block(spec, 1, 16)
        rows, columns = spec.global_shape[-2:]
        return runs, _block(spec, max(1, rows), max(1, columns))

    def together(self, spec: ShardSpec) -> tuple[str, ...]:
        """Runs are a tensor's own; fused tensors have one maximum per matrix."""
        parts = spec.name.split(".")
        for family in self.fused:
            for index, part in enumerate(parts):
                if part in family:
                    return "", ".".join([*parts[:index], "+".join(family), *parts[index + 1 :]])
        return "", ""

    def write(self, shard: Shard, maxima: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """See `Encoding.write`."""
        runs, matrices = maxima
        per_matrix = _positive(matrices, _over(matrices, E4M3_MAX * E2M1_MAX))
        relative = _over(runs, E2M1_MAX) / per_matrix
        stored = relative.clamp(_E4M3_SMALLEST, E4M3_MAX).to(torch.float8_e4m3fn)
        scales = stored.to(torch.float32) * per_matrix
        block, box = self.blocks(shard.spec)[0], shard.spec.box
        cells = grid_box(box, block)
        for band in bands(shard.tensor, box, block):
            within = band.relative_to(box)
            codes = _e2m1_codes(
                _scaled(shard.tensor[within], band, block, _of_cells(scales, band, block, cells))
            )
            pairs = codes[..., 0::2] | (codes[..., 1::2] << 4)
            last = within[-1]
            halves = (*within[:-1], slice(last.start // 2, last.stop // 2))
            into[0][halves].copy_(pairs, non_blocking=True)
        into[1].copy_(stored, non_blocking=True)
        into[2].copy_(per_matrix.reshape(into[2].shape), non_blocking=True)


def _block(spec: ShardSpec, rows: int, columns: int) -> Extents:
    if len(spec.global_shape) < 2:
        raise EncodingError(
            f"{spec.name} {spec.global_shape}: only matrices (and stacks of them) have blocks; "
            "leave it out of the encoding's names"
        )
    if spec.dtype not in _QUANTISABLE:
        raise EncodingError(
            f"{spec.name} {spec.global_shape}: {spec.dtype} is not quantised, only floating "
            "numbers of 16 bits and more are; leave it out of the encoding's names"
        )
    return (*(1 for _ in spec.global_shape[:-2]), rows, columns)


def _values_and_scales(
    spec: ShardSpec, block: Extents, suffix: str, scale_dtype: str
) -> tuple[ShardSpec, ShardSpec]:
    return (
        replace(spec, dtype="float8_e4m3fn"),
        ShardSpec(
            spec.name + suffix,
            grid_shape(spec.global_shape, block),
            grid_box(spec.box, block),
            scale_dtype,
        ),
    )


def _linear_scales(maxima: Tensor) -> Tensor:
    """``max / 448``; 1 for a block of zeros. Never subnormal, so that no quotient overflows."""
    return _positive(maxima, _over(maxima, E4M3_MAX))


def _over(values: Tensor, divisor: float) -> Tensor:
    """Divide as a processor does: a number would make CUDA multiply by its rounded reciprocal."""
    return values / values.new_full((), divisor)


def powers_of_two(code: Tensor) -> Tensor:
    """``2 ** (code - 127)`` in float32 for codes 0 to 254; CUDA's ``pow`` may be a bit off."""
    bits = torch.where(code > 0, code << 23, 1 << 22)  # the exponent; 2 ** -127 is subnormal
    return bits.to(torch.int32).view(torch.float32)


def _positive(maxima: Tensor, scales: Tensor) -> Tensor:
    return torch.where(maxima > 0, scales.clamp(min=_FLOAT32_TINY), 1.0)


def _write_fp8(shard: Shard, block: Extents, scales: Tensor, into: Sequence[Tensor]) -> None:
    """Write the values, and the scales where there is a second tensor."""
    box = shard.spec.box
    cells = grid_box(box, block)
    for band in bands(shard.tensor, box, block):
        within = band.relative_to(box)
        mine = _of_cells(scales, band, block, cells)
        quotients = _scaled(shard.tensor[within], band, block, mine)
        into[0][within].copy_(quotients, non_blocking=True)
    for stored in into[1:]:
        stored.copy_(scales, non_blocking=True)


def _of_cells(scales: Tensor, band: Box, block: Extents, cells: Box) -> Tensor:
    return scales[grid_box(band, block).relative_to(cells)]


def _scaled(values: Tensor, box: Box, block: Extents, scales: Tensor) -> Tensor:
    """Every value over the scale of its block, in float32."""
    ndim = len(block)
    spread = scales[tuple(x for _ in range(ndim) for x in (slice(None), None))]
    exact = values.to(torch.float32)
    return unpadded(padded_blocks(exact, box, block) / spread, box, block)


def _e2m1_codes(values: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, as its number; the sign is bit 3."""
    magnitudes = values.abs().contiguous()
    down = torch.tensor(_TIES_DOWN, device=values.device)
    up = torch.tensor(_TIES_UP, device=values.device)
    codes = torch.bucketize(magnitudes, down) + torch.bucketize(magnitudes, up, right=True)
    return codes.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
