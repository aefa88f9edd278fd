"""How a checkpoint says that its layers are rows of FP8, in the words of compressed-tensors."""

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
