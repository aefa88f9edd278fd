"""How a checkpoint says that its layers are FP8: rows by compressed-tensors, blocks as DeepSeek."""

from typing import Any

_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
ROWS_OF_FP8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {**_FP8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_FP8, "strategy": "token", "dynamic": True},
        }
    },
}
BLOCKS_OF_FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{layer}.mlp.gate" for layer in range(2)),
    ],
}
