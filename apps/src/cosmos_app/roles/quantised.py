"""Weights in 8 or 4 bits for the engines: quantised once where they are sent, served as they are.

The policy trains in its own precision. What engines start from is quantised the same way, so that
every version has one layout.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from cosmos_app.recipe import Recipe, WeightSyncConfig
from cosmos_app.roles.weights import trained_shards
from cosmos_parallel import ProcessContext
from cosmos_weightsync import Shard, WeightReceiver, WeightSender, checkpoint_shards, shards_of
from cosmos_weightsync.encodings import (
    AmaxGroup,
    Cast,
    EncodedShards,
    Encoding,
    MxFp8,
    NvFp4,
    RowwiseFp8,
    encode,
)

_MATRICES = "*_proj.weight"
# What vLLM fuses into one layer, with one scale per matrix for all of it.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# NVFP4 scales 16 activations at a time, times this: with it they may be anything from 0.003 to 84
# (e4m3 scales of 2**-6 to 448, values to 6), and more coarsely down to 4e-4.
_INPUT_SCALE = 2.0**-5
_FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}


def published_shards(
    model: nn.Module, recipe: Recipe, process: ProcessContext
) -> Sequence[Shard] | EncodedShards:
    """Return what a policy rank sends; adapters are quantised where they are added to the rest.

    Args:
        model: this rank's part.
        recipe: of the run.
        process: this rank; all ranks call this.
    """
    shards = trained_shards(model, recipe)
    if recipe.model.training.lora is not None:
        return shards
    return quantised_shards(shards, recipe.weight_sync, process)


def quantised_shards(
    shards: Iterable[Shard], config: WeightSyncConfig, process: ProcessContext | None = None
) -> Sequence[Shard] | EncodedShards:
    """Return what a sender publishes of these: themselves, unless engines hold fewer bits.

    Args:
        shards: what this rank holds.
        config: says what engines hold.
        process: this rank; with others beside it all of them call this, and each publish has one
            small all-reduce of the maxima of rows that several ranks hold.
    """
    held = tuple(shards)
    if not config.quantised:
        return held
    if config.quantised == "nvfp4":
        held = (*held, *_input_scales(held))
    together = process is not None and process.world_size > 1
    group = AmaxGroup.of_process_group(held) if together else None
    return encode(held, _encodings(config), group=group)


def engine_model(model: Path, config: WeightSyncConfig, run_dir: Path, replica: str) -> Path:
    """Return the directory that engines start from, made once for all replicas of a run.

    Args:
        model: what the policy starts from; engines start from it too unless they hold fewer bits.
        config: says what engines hold.
        run_dir: where the quantised one is written.
        replica: of this process; two may write at once, and the first to end is taken.
    """
    if not config.quantised:
        return model
    target = run_dir / f"model-{config.quantised}"
    if not target.exists():
        partial = run_dir / f"{target.name}.{replica}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        _write_quantised(model, config, partial)
        try:
            partial.replace(target)
        except OSError:  # another replica was faster
            shutil.rmtree(partial)
    return target


def _input_scales(shards: Iterable[Shard]) -> Sequence[Shard]:
    """Return the scales of activations that vLLM wants beside NVFP4 weights."""
    names = [s.spec.name for s in shards if fnmatchcase(s.spec.name, _MATRICES)]
    # A tensor for each: one under many names would be held to be tied, and travel once.
    scales = ((f"{n.removesuffix('weight')}input_scale", torch.tensor(_INPUT_SCALE)) for n in names)
    return tuple(shards_of(scales))


def _encodings(config: WeightSyncConfig) -> Sequence[Encoding]:
    rest = Cast(dtype=config.wire_dtype or "bfloat16")
    if config.quantised == "mxfp8":
        return (MxFp8(names=(_MATRICES,)), rest)
    if config.quantised == "nvfp4":
        scales = Cast(dtype="float32", names=("*.input_scale",))
        return (NvFp4(names=(_MATRICES,), fused=_FUSED), scales, rest)
    return (RowwiseFp8(names=(_MATRICES,)), rest)


def _write_quantised(model: Path, config: WeightSyncConfig, into: Path) -> None:
    tensors: dict[str, Tensor] = {}
    with WeightSender(quantised_shards(checkpoint_shards(model), config)) as sender:
        sender.publish(0)
        with WeightReceiver([sender.endpoint]) as receiver:
            receiver.stage(0)
            for shard in receiver.staged_shards():
                tensors[shard.spec.name] = shard.tensor.clone()
    into.mkdir(parents=True)
    save_torch_state_dict(tensors, into)
    for file in model.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copyfile(file, into / file.name)
    described = json.loads((model / "config.json").read_text())
    described["dtype"] = config.wire_dtype or "bfloat16"
    described["quantization_config"] = _quantisation(config, tensors)
    (into / "config.json").write_text(json.dumps(described, indent=2))


def _quantisation(config: WeightSyncConfig, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Return what tells vLLM how these weights are stored, in its own terms."""
    whole = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.ndim == 2 and f"{name}_scale" not in tensors
    ]
    # The head may be the embedding's and then is no tensor of its own.
    whole = sorted({*whole, "lm_head"})
    if config.quantised == "mxfp8":
        return {"quant_method": "mxfp8", "ignored_layers": whole}
    if config.quantised == "nvfp4":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": whole,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": whole,
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": {**_FLOAT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_FLOAT8, "strategy": "token", "dynamic": True},
            }
        },
    }
