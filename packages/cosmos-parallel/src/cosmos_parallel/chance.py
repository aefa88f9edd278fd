"""What models leave to chance in training, turned off: log-probabilities must not depend on it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# by the names of settings and of what modules keep of them
_DROPOUT = ("dropout", "pdrop", "layerdrop", "drop_path")
_JITTER = ("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def turn_jitter_off(model: nn.Module) -> None:
    """Have routers choose experts as they do when a model is served: by no chance."""
    for module in model.modules():
        if any(getattr(module, name, None) for name in _JITTER):
            module.eval()


def turn_dropout_off(config: "PretrainedConfig") -> dict[tuple[str, str], float]:
    """Return the rates that a config and its parts had, by part ("" for the whole) and name."""
    rates = {
        (part, name): value
        for part in ("", *config.sub_configs)
        for name, value in vars(_part(config, part)).items()
        if isinstance(value, float) and any(each in name for each in _DROPOUT)
    }
    for part, name in rates:
        setattr(_part(config, part), name, 0.0)
    return rates


def tell_dropout(config: "PretrainedConfig", rates: Mapping[tuple[str, str], float]) -> None:
    """Give a config the rates again, so that an export says what the original said."""
    for (part, name), rate in rates.items():
        setattr(_part(config, part), name, rate)


def _part(config: "PretrainedConfig", name: str) -> "PretrainedConfig":
    return (getattr(config, name, None) or config) if name else config
