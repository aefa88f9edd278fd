"""Checkpoints in the quantised forms that vLLM loads, by our own quantisers."""

import json
from pathlib import Path
from typing import Any

import torch
from layers_of_fp8 import BLOCKS_OF_FP8, ROWS_OF_FP8
from safetensors.torch import save_file

from cosmos_weightsync import WeightReceiver, WeightSender, checkpoint_shards, shards_of
from cosmos_weightsync.encodings import (
    BlockFp8,
    Cast,
    EncodedShards,
    MxFp8,
    NvFp4,
    RowwiseFp8,
    encode,
)

LINEAR = ("*_proj.weight", "*_proj_with_mqa.weight")
QUANTISED: dict[str, tuple[BlockFp8 | MxFp8 | NvFp4 | RowwiseFp8, dict[str, Any]]] = {
    "fp8": (RowwiseFp8(names=LINEAR), ROWS_OF_FP8),
    "fp8-block": (BlockFp8(names=LINEAR), BLOCKS_OF_FP8),
    "mxfp8": (MxFp8(names=LINEAR), {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}),
    "nvfp4": (
        NvFp4(names=LINEAR),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["lm_head"],
        },
    ),
}


def quantised(kind: str, folder: Path) -> EncodedShards:
    """What a sender publishes of a checkpoint, with the scales of activations that NVFP4 wants."""
    shards = checkpoint_shards(folder)
    names = [shard.spec.name for shard in shards if "_proj.weight" in shard.spec.name]
    scales = {name.replace("weight", "input_scale"): torch.tensor(2.0**-9) for name in names}
    more = shards_of(scales.items()) if kind == "nvfp4" else ()
    return encode([*shards, *more], [QUANTISED[kind][0], Cast(dtype="bfloat16")])


def write_quantised(kind: str, folder: Path, into: Path) -> None:
    """The same as a checkpoint that vLLM loads by itself."""
    with WeightSender(quantised(kind, folder)) as sender:
        sender.publish(1)
        with WeightReceiver([sender.endpoint]) as receiver:
            receiver.stage(1)
            received = {s.spec.name: s.tensor.clone() for s in receiver.staged_shards()}
    into.mkdir()
    save_file(received, into / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    described = {**config, "dtype": "bfloat16", "quantization_config": QUANTISED[kind][1]}
    (into / "config.json").write_text(json.dumps(described))
