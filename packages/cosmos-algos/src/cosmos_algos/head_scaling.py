"""What a model makes of the products of its output head: factors and caps, by its configuration.

The same setting is a factor in one family, a divisor in another and of hidden states in a third, so
that it is read only where it is known; the classes of transformers are the source.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cosmos_algos.output_head import UNSCALED, LogitScaling

# By model_type, the setting that its class multiplies logits by.
_FACTORS: dict[str, str] = {
    **dict.fromkeys(
        ("cohere", "cohere2", "cohere2_moe", "cohere_compass", "cohere_compass_text"), "logit_scale"
    ),
    **dict.fromkeys(("hyperclovax", "hyperclovax_vision_v2"), "logits_scaling"),
    "falcon_h1": "lm_head_multiplier",
    "muse_glimmer": "output_multiplier",
}
# The one that it divides them by.
_DIVISORS: dict[str, str] = dict.fromkeys(
    (
        *("granite", "granite_swa", "granite4_vision", "granitemoe", "granitemoe_swa"),
        *("granitemoehybrid", "granitemoeshared"),
    ),
    "logits_scaling",
)
# The one that it bounds them by.
_CAPS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("gemma2", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
            *("gemma4_unified", "gemma4_unified_text", "muse_glimmer", "nanochat", "vaultgemma"),
        ),
        "final_logit_softcapping",
    ),
    "recurrent_gemma": "logits_soft_cap",
}
# The one that it divides hidden states by, in front of the head.
_IN_FRONT: dict[str, str] = {"minicpm3": "logits_scaling"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadScaling:
    """Where products of hidden states and weight become logits.

    Attributes:
        within: what the head itself makes of them.
        behind: what the model makes of what its head returns.
    """

    within: LogitScaling = UNSCALED
    behind: LogitScaling = UNSCALED

    @property
    def whole(self) -> LogitScaling:
        """Both; one of them changes nothing."""
        return self.behind if self.within.changes_nothing else self.within


def head_scaling(model: nn.Module, head: nn.Linear) -> HeadScaling | None:
    """Return how a model scales its logits; ``None`` if it does so in a way that is not known.

    Args:
        model: with the configuration of transformers as ``config``, if with any.
        head: its output head; one that scales says so by ``output_multiplier`` and
            ``output_soft_cap_temp``, as torchtitan's ``SoftCappedLinear`` does, whatever the
            configuration says besides.
    """
    cap = getattr(head, "output_soft_cap_temp", None)
    multiplier = getattr(head, "output_multiplier", None)
    if cap is not None or multiplier is not None:
        within = LogitScaling(multiplier=multiplier or 1.0, cap=cap, least=torch.float32)
        return HeadScaling(within=within)
    config: Any = getattr(model, "config", None)  # any Hugging Face configuration
    if config is None:
        return HeadScaling()
    kind, text = getattr(config, "model_type", ""), config.get_text_config()
    known = {settings.get(kind) for settings in (_FACTORS, _DIVISORS, _CAPS, _IN_FRONT)}
    if not _settings(text) <= known:
        return None
    factor, divisor = _setting(text, _FACTORS.get(kind)), _setting(text, _DIVISORS.get(kind))
    return HeadScaling(
        behind=LogitScaling(
            multiplier=(1.0 if factor is None else factor) / (divisor or 1.0),
            cap=_setting(text, _CAPS.get(kind)),
        )
    )


def _settings(text: Any) -> set[str]:
    """Return the settings that a configuration has, of those that change logits anywhere."""
    factors = {*_FACTORS.values(), *_DIVISORS.values()}
    found = {name for name in factors if getattr(text, name, None) not in {None, 1}}
    return found | {name for name in set(_CAPS.values()) if getattr(text, name, None) is not None}


def _setting(text: Any, name: str | None) -> float | None:
    return None if name is None else getattr(text, name)
