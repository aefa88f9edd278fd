"""Quantised weights are, bit for bit, those of the libraries that will load them."""

import pytest
import torch

from cosmos_weightsync import shards_of
from cosmos_weightsync.encodings import BlockFp8, Encoding, MxFp8, NvFp4, encode
from cosmos_weightsync.shards import torch_dtype

# Both libraries warn about what they depend on.
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ("w",)


@pytest.fixture(scope="module")
def w() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-6, 6, (256, 1), generator=generator).float()
    return torch.randn(256, 512, generator=generator) * torch.exp2(powers)


def published(w: torch.Tensor, encoding: Encoding) -> list[torch.Tensor]:
    encoded = encode(shards_of([("w", w)]), [encoding])
    tensors = [torch.empty(s.box.shape, dtype=torch_dtype(s.dtype)) for s in encoded.specs]
    encoded.write(tensors)
    return tensors


def assert_same_bytes(found, expected) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def test_mxfp8_is_torchaos(w):
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = mx_tensor.ScaleCalculationMode.RCEIL
    scales, values = mx_tensor.to_mx(w, torch.float8_e4m3fn, 32, mode)
    assert_same_bytes(published(w, MxFp8(names=NAMES)), (values, scales))


def test_nvfp4_is_torchaos(w):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    per_matrix = nvfp4.per_tensor_amax_to_scale(w.abs().max())
    scales, values = nvfp4.nvfp4_quantize(w, 16, per_matrix)
    found = published(w, NvFp4(names=NAMES))
    assert_same_bytes(found[:2], (values.reshape(256, 256), scales))
    assert found[2] == per_matrix


def test_block_fp8_is_vllms(w):
    deep_gemm = pytest.importorskip("vllm.utils.deep_gemm")
    assert_same_bytes(published(w, BlockFp8(names=NAMES)), deep_gemm.per_block_cast_to_fp8(w))


def test_mxfp8_is_vllms(w):
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.mxfp8_utils")
    values, scales = utils._mxfp8_e4m3_quantize_torch(w)
    assert_same_bytes(published(w, MxFp8(names=NAMES)), (values, scales))
