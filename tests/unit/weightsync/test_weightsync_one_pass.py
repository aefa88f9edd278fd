"""FP8 written in one pass: the kernel by an interpreter, its bytes and its refusals on a GPU."""

import math
from importlib.util import find_spec

import pytest
import torch
from capabilities import needs
from triton_interpreter import check_interpreted

from cosmos_weightsync import Box, EncodingError, Shard, ShardSpec, shards_of
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.encodings import BlockFp8, RowwiseFp8, encode
from cosmos_weightsync.encodings.one_pass import has_one_pass
from cosmos_weightsync.holding import Reader, VersionRange
from cosmos_weightsync.shards import torch_dtype
from cosmos_weightsync.snapshots import SnapshotStore

ROWS, BLOCKS = RowwiseFp8(names=("*",)), BlockFp8(names=("*",))
SOMEBODY = Reader("somebody", lambda: None)

# The interpreter rounds to e4m3 otherwise than a GPU: what is compared are the quotients.
INTERPRETED = """
import torch
from cosmos_weightsync.encodings.one_pass import write_blocks
chance = torch.Generator().manual_seed(0)
shapes = [((300, 200), (128, 128)), ((5, 700), (1, 700)), ((2, 130, 260), (1, 128, 128)),
          ((2, 3, 50), (1, 1, 50))]
for shape, block in shapes:
    w = torch.randn(shape, generator=chance)
    w *= torch.exp2(torch.randint(-12, 6, (*shape[:-1], 1), generator=chance).float())
    w[..., :1, :] = 0.0
    w[..., -1, -1] = 1e-42
    cells = tuple(-(-extent // size) for extent, size in zip(shape, block))
    maxima, scales, found = torch.empty(cells), torch.empty(cells), torch.empty(shape)
    wide = torch.zeros(*shape[:-1], shape[-1] + 24)
    wide[..., :shape[-1]] = w
    write_blocks(wide[..., :shape[-1]], found, maxima, scales, block)
    spread = torch.empty(shape)
    for cell in torch.cartesian_prod(*map(torch.arange, cells)).tolist():
        part = tuple(slice(i * size, (i + 1) * size) for i, size in zip(cell, block))
        largest = w[part].abs().max()
        assert maxima[tuple(cell)] == largest, (shape, cell)
        scale = (largest / torch.tensor(448.0)).clamp(min=2.0**-126) if largest else 1.0
        assert scales[tuple(cell)] == scale, (shape, cell)
        spread[part] = scales[tuple(cell)]
    assert torch.equal(found, w / spread), shape
w = torch.ones(130, 130)
w[3, 4], w[129, 0] = float("nan"), -float("inf")
write_blocks(w, torch.empty(130, 130), maxima := torch.empty(2, 2), torch.empty(2, 2), (128, 128))
assert maxima.tolist() == [[float("inf"), 1.0], [float("inf"), 1.0]]
"""


@needs("triton", find_spec("triton") is not None)
def test_the_kernel_finds_the_maxima_scales_and_quotients_of_loops():
    check_interpreted(INTERPRETED)


def test_a_processor_takes_two_passes():
    (shard,) = shards_of([("w", torch.ones(4, 4))])
    assert not has_one_pass(ROWS, shard)


class OnePass:
    """A source that looks at its values as it writes them, unless it is asked not to."""

    is_cuda = False

    def __init__(self, values: torch.Tensor) -> None:
        (shard,) = shards_of([("w", values)])
        self._source = encode([shard], [ROWS])
        self.specs = self._source.specs

    def prepare(self, *, spoils: bool = False):
        return self._spoil if spoils else self._source.prepare()

    def _spoil(self, tensors, followed):
        for tensor in tensors:
            tensor.view(torch.uint8).zero_()
        self._source.prepare()(tensors, followed)


@pytest.mark.parametrize("is_only_buffer", [True, False])
def test_a_version_that_can_be_had_is_not_spoiled(is_only_buffer):
    values = torch.ones(2, 4)
    store = SnapshotStore(OnePass(values), max_snapshots=2)
    store.publish(1, Deadline.after(5))
    if is_only_buffer:
        store.pin(VersionRange(1), Deadline.after(5), SOMEBODY)
    store.publish(2, Deadline.after(5))
    values[0, 0] = math.nan
    with pytest.raises(EncodingError, match=r"w \[0:1, 0:4\]: holds infinity or NaN"):
        store.publish(3, Deadline.after(5))
    assert store.newest_version == 2
    pinned = store.pin(VersionRange(2), Deadline.after(5), SOMEBODY)
    assert pinned.tensors[0].tolist() == [[448.0] * 4] * 2
    values[0, 0] = 2.0
    if not is_only_buffer:
        store.publish(3, Deadline.after(5))
        assert store.newest_version == 3


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    chance = torch.Generator().manual_seed(5)
    values = torch.randn(shape, generator=chance)
    values *= torch.exp2(torch.randint(-14, 6, (*shape[:-1], 1), generator=chance).float())
    values[..., :32, :32] = 0.0
    return values.to(dtype)


def written(shard: Shard, encoding, device: str, *, spoils: bool) -> list[torch.Tensor]:
    encoded = encode([shard], [encoding])
    into = [
        torch.full(s.box.shape, 7, device=device).to(torch_dtype(s.dtype)) for s in encoded.specs
    ]
    encoded.prepare(spoils=spoils)(into, None)
    return [tensor.cpu() for tensor in into]


@pytest.mark.gpu
@pytest.mark.parametrize("into", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoding", [ROWS, BLOCKS], ids=lambda encoding: encoding.kind)
@pytest.mark.parametrize("shape", [(1500, 1000), (70_000, 64), (3, 300, 520), (2, 20_000)])
def test_a_gpu_writes_the_bytes_of_a_processor_in_one_pass(shape, encoding, dtype, into):
    spec = ShardSpec("w", shape, Box.full(shape), str(dtype).removeprefix("torch."))
    w = drawn(shape, dtype)
    on_gpu = Shard(spec, w.cuda())
    assert has_one_pass(encoding, on_gpu)
    here = written(Shard(spec, w), encoding, "cpu", spoils=False)
    there = written(on_gpu, encoding, into, spoils=True)
    for expected, found in zip(here, there, strict=True):
        assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gpu_names_the_block_with_a_value_that_is_not_finite(bad):
    w = torch.ones(256, 300, device="cuda")
    w[200, 290] = bad
    (shard,) = shards_of([("w", w)])
    with pytest.raises(EncodingError, match=r"w \[128:256, 256:300\]: holds infinity or NaN"):
        written(shard, BLOCKS, "cuda", spoils=True)


@pytest.mark.gpu
def test_rows_that_no_program_holds_and_blocks_that_are_cut_take_two_passes():
    (wide,) = shards_of([("w", torch.ones(2, 40_000, device="cuda"))])
    assert not has_one_pass(ROWS, wide)
    spec = ShardSpec("w", (256, 256), Box((0, 0), (100, 256)), "float32")
    assert not has_one_pass(BLOCKS, Shard(spec, torch.ones(100, 256, device="cuda")))
