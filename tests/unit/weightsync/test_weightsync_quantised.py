"""Quantised weights against references written as plain loops over single numbers."""

import bisect
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_weightsync import Box, EncodingError, Shard, ShardSpec, shards_of
from cosmos_weightsync.encodings import BlockFp8, Cast, MxFp8, NvFp4, RowwiseFp8, encode
from cosmos_weightsync.encodings.quantised import powers_of_two
from cosmos_weightsync.shards import torch_dtype

NAMES = ("w*",)


def minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a non-negative code, by the formula of the formats."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return 2.0 ** (1 - bias) * fraction
    return 2.0 ** (exponent - bias) * (1.0 + fraction)


E4M3 = [minifloat(code, 4, 3) for code in range(0x7F)]  # 0x7f is NaN.
E2M1 = [minifloat(code, 2, 1) for code in range(8)]


def nearest(value: float, table: list[float]) -> int:
    """The code of the nearest magnitude; the even code of two as near; the last one beyond."""
    magnitude = min(abs(value), table[-1])
    above = bisect.bisect_left(table, magnitude)
    return min((max(above - 1, 0), above), key=lambda c: (abs(table[c] - magnitude), c % 2))


def f32(value: float) -> float:
    return float(np.float32(value))


def published(shard_or_tensor, encoding) -> dict[str, torch.Tensor]:
    shards = (
        [shard_or_tensor]
        if isinstance(shard_or_tensor, Shard)
        else shards_of([("w", shard_or_tensor)])
    )
    encoded = encode(shards, [encoding])
    tensors = [torch.empty(s.box.shape, dtype=torch_dtype(s.dtype)) for s in encoded.specs]
    encoded.write(tensors)
    return {spec.name: tensor for spec, tensor in zip(encoded.specs, tensors, strict=True)}


def magnitudes(values: np.ndarray) -> float:
    return max((abs(float(v)) for v in values.ravel()), default=0.0)


def fp8_by_loops(w: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of blocks of rows x columns."""
    height, width = w.shape
    scales = np.zeros((math.ceil(height / rows), math.ceil(width / columns)), np.float32)
    codes = np.zeros(w.shape, np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            amax = magnitudes(w[part])
            scale = max(f32(amax / 448.0), 2.0**-126) if amax else 1.0
            scales[i, j] = scale
            for r in range(part[0].start, min(part[0].stop, height)):
                for c in range(part[1].start, min(part[1].stop, width)):
                    sign = 0x80 if math.copysign(1.0, float(w[r, c])) < 0 else 0
                    codes[r, c] = sign | nearest(f32(float(w[r, c]) / scale), E4M3)
    return codes, scales


def weights(height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Magnitudes over many powers of two, a zero block in the first corner, signed zeros."""
    generator = torch.Generator().manual_seed(height * 1000 + width)
    values = torch.randn(height, width, generator=generator)
    values *= torch.exp2(torch.randint(-12, 6, (height, 1), generator=generator).float())
    values[: min(32, height), :32] = 0.0
    values[-1, -1] = -0.0
    return values.to(dtype)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((64, 96), 32), ((33, 70), 32), ((1, 1), 32), ((128, 130), 128)],
    ids=["even", "ragged in both dims", "one number", "the usual block"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_block_fp8_is_what_the_loops_say(shape, block, dtype):
    w = weights(*shape, dtype)
    found = published(w, BlockFp8(names=NAMES, block=block))
    codes, scales = fp8_by_loops(w.float().numpy(), block, block)
    assert found["w"].view(torch.uint8).tolist() == codes.tolist()
    assert found["w_scale_inv"].tolist() == scales.tolist()


def test_rowwise_fp8_is_what_the_loops_say():
    w = weights(40, 24)
    found = published(w, RowwiseFp8(names=NAMES))
    codes, scales = fp8_by_loops(w.numpy(), 1, 24)
    assert found["w"].view(torch.uint8).tolist() == codes.tolist()
    assert (found["w_scale"].shape, found["w_scale"].tolist()) == ((40, 1), scales.tolist())


def test_mxfp8_is_what_the_loops_say():
    w = weights(40, 70)
    w[5, 32:64] = 448.0  # A maximum that is exactly the largest value times a power of two,
    w[6, 32:64] = 449.0  # and one just above.
    found = published(w, MxFp8(names=NAMES))
    for row in range(40):
        for run in range(3):
            part = w[row, run * 32 : (run + 1) * 32].numpy()
            amax, power = magnitudes(part), -127
            while amax / 448.0 > 2.0**power:
                power += 1
            assert found["w_scale"][row, run] == power + 127
            codes = [
                nearest(float(v) / 2.0**power, E4M3) | (0x80 if math.copysign(1, v) < 0 else 0)
                for v in part
            ]
            assert found["w"][row, run * 32 : (run + 1) * 32].view(torch.uint8).tolist() == codes
    assert (found["w_scale"][5, 1], found["w_scale"][6, 1]) == (127, 128)


def test_nvfp4_is_what_the_loops_say():
    w = weights(40, 48)
    found = published(w, NvFp4(names=NAMES))
    assert (found["w"].shape, found["w_scale"].shape) == ((40, 24), (40, 3))
    whole = f32(magnitudes(w.numpy()) / (448.0 * 6.0))
    assert found["w_scale_2"].item() == whole
    for row in range(40):
        for run in range(3):
            part = w[row, run * 16 : (run + 1) * 16].numpy()
            relative = f32(f32(magnitudes(part) / 6.0) / whole)
            code = max(1, nearest(relative, E4M3))
            assert found["w_scale"].view(torch.uint8)[row, run] == code
            scale = f32(E4M3[code] * whole)
            codes = [
                nearest(f32(float(v) / scale), E2M1) | (8 if math.copysign(1, v) < 0 else 0)
                for v in part
            ]
            packed = [low | (high << 4) for low, high in zip(codes[::2], codes[1::2], strict=True)]
            assert found["w"][row, run * 8 : (run + 1) * 8].tolist() == packed


def published_of(named: dict[str, torch.Tensor], encoding) -> dict[str, torch.Tensor]:
    encoded = encode(shards_of(named.items()), [encoding])
    tensors = [torch.empty(s.box.shape, dtype=torch_dtype(s.dtype)) for s in encoded.specs]
    encoded.write(tensors)
    return {spec.name: tensor for spec, tensor in zip(encoded.specs, tensors, strict=True)}


def test_fused_matrices_have_the_scale_of_the_largest_and_nobody_else_has():
    named = {
        "0.q.weight": torch.full((4, 16), 2.0),
        "0.k.weight": torch.full((2, 16), -10.5),
        "1.k.weight": torch.full((2, 16), 21.0),
        "0.o.weight": torch.full((4, 16), 42.0),
    }
    found = published_of(named, NvFp4(names=("*",), fused=(("q", "k"),)))
    whole = {name: found[f"{name}_scale_2"].item() * 2688.0 for name in named}
    assert whole == pytest.approx(
        {"0.q.weight": 10.5, "0.k.weight": 10.5, "1.k.weight": 21.0, "0.o.weight": 42.0}
    )
    # 2 is a third of 6 times the run's scale, and the run's scale is 2/6 / (10.5/2688) in e4m3.
    scale = torch.tensor(2 / 6 / (10.5 / 2688)).to(torch.float8_e4m3fn).float().item()
    assert found["0.q.weight_scale"].float().unique().tolist() == [scale]
    assert found["0.q.weight"].unique().tolist() == [0x77]  # every code is 6


def test_fused_stacks_of_experts_share_a_scale_for_each_expert():
    gate = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 3, 16).clone()
    up = torch.tensor([8.0, 0.5])[:, None, None].expand(2, 3, 16).clone()
    fused = NvFp4(names=("*",), fused=(("gate", "up"),))
    found = published_of({"gate": gate, "up": up}, fused)
    for name in ("gate", "up"):
        assert (found[f"{name}_scale_2"] * 2688).tolist() == pytest.approx([8.0, 2.0])
    with pytest.raises(EncodingError, match=r"up .*has \(1, 1\) blocks to share with gate\+up"):
        published_of({"gate": gate, "up": up[0]}, fused)


def test_every_value_between_two_of_fp4_goes_to_the_nearest_and_ties_to_the_even_code():
    # The first value sets the scales: 6 * 448 in a run of 16 makes both of them 1.
    row = [2688.0, *[448.0 * tie for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)], *[0.0] * 8]
    found = published(torch.tensor([row]), NvFp4(names=NAMES))
    assert (found["w_scale"].item(), found["w_scale_2"].item()) == (448.0, 1.0)
    codes = [int(b) >> shift & 0xF for b in found["w"][0] for shift in (0, 4)]
    assert [E2M1[code] for code in codes[:8]] == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def dequantised(found: dict[str, torch.Tensor], block: tuple[int, int]) -> torch.Tensor:
    suffix = "w_scale_inv" if "w_scale_inv" in found else "w_scale"
    scales = found[suffix].float()
    if found[suffix].dtype == torch.uint8:
        scales = torch.exp2(found[suffix].float() - 127)
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    if "w_scale_2" in found:
        codes = torch.stack([found["w"] & 0xF, found["w"] >> 4], -1).flatten(-2).long()
        values = torch.tensor([*E2M1, *(-v for v in E2M1)])[codes] * found["w_scale_2"]
    else:
        values = found["w"].float()
    return values * spread[: values.shape[0], : values.shape[1]]


@pytest.mark.parametrize(
    ("encoding", "block", "bound"),
    [
        # Half a step of the largest values (256 to 448, steps of 32) over the maximum.
        (BlockFp8(names=NAMES), (128, 128), 16 / 448),
        (RowwiseFp8(names=NAMES), (1, 256), 16 / 448),
        # The scale may be twice as large as it would have to be.
        (MxFp8(names=NAMES), (1, 32), 16 / 448 * 2),
        # Half of the step from 4 to 6, and the block's scale is itself rounded by up to 1/16.
        (NvFp4(names=NAMES), (1, 16), 1 / 6 * 17 / 16 + 1 / 16),
    ],
    ids=["block", "rowwise", "mxfp8", "nvfp4"],
)
def test_the_error_stays_within_half_a_step(encoding, block, bound):
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    error = (dequantised(published(w, encoding), block) - w).abs()
    cells = w.abs().reshape(256 // block[0], block[0], 256 // block[1], block[1])
    maxima = cells.amax((1, 3)).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    assert float((error / maxima).max()) <= bound


def test_a_stack_of_experts_is_quantised_one_by_one():
    stack = torch.stack([weights(32, 64), 100 * weights(32, 64)])
    for encoding in (BlockFp8(names=NAMES, block=32), MxFp8(names=NAMES), NvFp4(names=NAMES)):
        found = published(stack, encoding)
        for index in range(2):
            alone = published(stack[index], encoding)
            for name, tensor in alone.items():
                assert found[name][index].float().tolist() == tensor.float().tolist()


def test_large_tensors_are_worked_on_in_bands_without_a_seam():
    w = torch.randn(1500, 1000, generator=torch.Generator().manual_seed(1))  # Over one band.
    found = published(w, BlockFp8(names=NAMES))
    last = published(w[1408:, 896:].contiguous(), BlockFp8(names=NAMES))
    assert torch.equal(
        found["w"][1408:, 896:].contiguous().view(torch.uint8), last["w"].view(torch.uint8)
    )
    assert found["w_scale_inv"][11:, 7:].tolist() == last["w_scale_inv"].tolist()


def test_the_smallest_and_largest_floats_have_finite_scales():
    for value in (1e-45, 1e-38, 3.4e38):
        for encoding in (BlockFp8(names=NAMES), MxFp8(names=NAMES), NvFp4(names=NAMES)):
            found = published(torch.full((2, 64), value), encoding)
            assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in found.values())
            assert not bool(found["w"].float().isnan().any())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "encoding", [RowwiseFp8(names=NAMES), BlockFp8(names=NAMES), NvFp4(names=NAMES)]
)
def test_a_value_that_is_not_finite_is_named(encoding, bad):
    w = torch.ones(256, 256)
    w[200, 130] = bad
    with pytest.raises(EncodingError, match=r"w \[.*\]: holds infinity or NaN"):
        published(w, encoding)


def test_the_block_with_the_bad_value_is_named():
    w = torch.ones(256, 300)
    w[200, 290] = math.nan
    with pytest.raises(EncodingError, match=r"w \[128:256, 256:300\]"):
        published(w, BlockFp8(names=NAMES))


def test_a_shard_that_cuts_a_block_is_told_how_to_be_cut():
    spec = ShardSpec("w", (256, 256), Box((0, 0), (100, 256)), "float32")
    with pytest.raises(EncodingError, match=r"cuts block \[0:128, 0:128\].*multiples.*128x128"):
        encode([Shard(spec, torch.ones(100, 256))], [BlockFp8(names=NAMES)])


def test_two_shards_of_one_rank_may_share_a_block():
    w = weights(100, 64)
    parts = [Box((0, 0), (30, 64)), Box((30, 0), (100, 64))]
    shards = [
        Shard(ShardSpec("w", (100, 64), box, "float32"), w[box.start[0] : box.stop[0]])
        for box in parts
    ]
    encoded = encode(shards, [BlockFp8(names=NAMES)])
    tensors = [torch.empty(s.box.shape, dtype=torch_dtype(s.dtype)) for s in encoded.specs]
    encoded.write(tensors)
    whole = published(w, BlockFp8(names=NAMES))
    assert torch.equal(
        torch.cat([tensors[0], tensors[2]]).view(torch.uint8), whole["w"].view(torch.uint8)
    )
    assert tensors[1].tolist() == tensors[3].tolist() == whole["w_scale_inv"].tolist()


@pytest.mark.parametrize(
    ("tensor", "encoding", "message"),
    [
        (torch.ones(8), BlockFp8(names=NAMES), "only matrices"),
        (torch.ones(()), BlockFp8(names=NAMES), "only matrices"),
        (torch.ones(()), RowwiseFp8(names=NAMES), "only matrices"),
        (torch.ones(()), NvFp4(names=NAMES), "only matrices"),
        (torch.ones(4, 7), NvFp4(names=NAMES), "must be even"),
        (torch.ones(4, 8, dtype=torch.int64), BlockFp8(names=NAMES), "int64 is not quantised"),
        (torch.ones(4, 8, dtype=torch.bool), MxFp8(names=NAMES), "bool is not quantised"),
        (torch.ones(4, 8).to(torch.float8_e4m3fn), RowwiseFp8(names=NAMES), "e4m3fn is not quant"),
    ],
)
def test_what_has_no_blocks_is_refused(tensor, encoding, message):
    with pytest.raises(EncodingError, match=message):
        published(tensor, encoding)


def test_the_first_encoding_that_matches_applies_and_the_rest_is_sent_as_it_is():
    pairs = [("a.weight", torch.ones(2, 2)), ("norm", torch.ones(2)), ("ids", torch.arange(3))]
    rules = [BlockFp8(names=("a.*",)), Cast(names=("*",), dtype="bfloat16")]
    specs = encode(shards_of(pairs), rules).specs
    assert [(spec.name, spec.dtype) for spec in specs] == [
        ("a.weight", "float8_e4m3fn"),
        ("a.weight_scale_inv", "float32"),
        ("norm", "bfloat16"),
        ("ids", "int64"),
    ]


@pytest.mark.parametrize("kind", [RowwiseFp8, BlockFp8, MxFp8, NvFp4, partial(Cast, dtype="")])
def test_one_pattern_is_not_taken_for_its_letters(kind):
    """Of which ``*`` matches every name."""
    with pytest.raises(EncodingError, match=r"several patterns: \('\*_proj\.weight',\)"):
        encode(shards_of([("w", torch.ones(2, 16))]), [kind(names="*_proj.weight")])


def test_a_block_holds_something():
    with pytest.raises(EncodingError, match="a block of 0 x 0 holds nothing"):
        BlockFp8(names=NAMES, block=0)


def test_a_scale_may_not_take_a_tensors_name():
    pairs = [("w", torch.ones(2, 2)), ("w_scale", torch.ones(2, 1))]
    with pytest.raises(EncodingError, match="w_scale: both w and w_scale"):
        encode(shards_of(pairs), [RowwiseFp8(names=("w",))])


class Divisors(TorchDispatchMode):
    """Notes what is divided by."""

    def __init__(self):
        super().__init__()
        self.kinds = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        if func.overloadpacket is torch.ops.aten.div:
            self.kinds.add(type(args[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "encoding",
    [RowwiseFp8(names=NAMES), BlockFp8(names=NAMES), MxFp8(names=NAMES), NvFp4(names=NAMES)],
    ids=lambda encoding: encoding.kind,
)
def test_nothing_is_divided_by_a_number_whose_reciprocal_cuda_would_take(encoding):
    with Divisors() as divisors:
        published(weights(32, 64), encoding)
    assert divisors.kinds == {torch.Tensor}


def test_scales_of_mxfp8_are_powers_of_two_to_the_bit():
    exact = [2.0 ** (code - 127) for code in range(255)]
    assert powers_of_two(torch.arange(255, dtype=torch.int32)).tolist() == exact


@pytest.mark.gpu
@pytest.mark.parametrize(
    "encoding",
    [RowwiseFp8(names=NAMES), BlockFp8(names=NAMES), MxFp8(names=NAMES), NvFp4(names=NAMES)],
    ids=lambda encoding: encoding.kind,
)
def test_a_gpu_writes_the_bytes_of_a_cpu(encoding):
    w = weights(1500, 1000)
    here, there = published(w, encoding), published(w.cuda(), encoding)
    for name, tensor in here.items():
        assert torch.equal(
            tensor.view(-1).view(torch.uint8), there[name].view(-1).view(torch.uint8)
        )
