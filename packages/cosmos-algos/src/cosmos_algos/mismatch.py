"""How far the policy that trains is from the one that sampled, as sums that add over batches.

Sums alone travel; ``summarise_metrics`` makes means and shares of them when they are all in.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cosmos_algos.arguments import check_mask, check_same_shape
from cosmos_algos.corrections import LOG_RATIO_LIMIT
from cosmos_algos.divergence import k3

MAX_LAG = 4
FAR_NATS = (0.1, 1.0)


def mismatch_sums(
    log_ratios: Float[Tensor, "B T"], trainable: Bool[Tensor, "B T"], lags: Int[Tensor, "B T"]
) -> dict[str, Float[Tensor, ""]]:
    """Return sums over trainable tokens of measures of Δ = log π - log μ.

    Keys: ``mismatch/abs`` Σ|Δ|, ``mismatch/k3`` Σ of k3(Δ of μ from π), an estimate of KL(μ‖π),
    ``mismatch/weight`` Σ e^Δ and ``mismatch/weight_squared`` for the effective sample size,
    ``mismatch/over_0.1`` and ``mismatch/over_1`` counts of |Δ| beyond that many nats, and for lags
    0 to 4 (4 and more) ``lag<n>/tokens`` and ``lag<n>/abs``: at lag 0 only the engines differ.

    Raises:
        ShapeError: if the three have different shapes, or the mask is one of numbers.
    """
    check_mask("mismatch: trainable", trainable)
    tensors = {"log_ratios": log_ratios, "trainable": trainable, "lags": lags}
    check_same_shape("mismatch", tensors)
    delta = torch.where(trainable, log_ratios.detach(), 0.0)
    delta = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    distance = delta.abs()
    ratios = delta.exp() * trainable
    sums = {
        "mismatch/abs": distance.sum(),
        "mismatch/k3": k3(-delta).sum(),
        "mismatch/weight": ratios.sum(),
        "mismatch/weight_squared": (ratios**2).sum(),
    }
    for nats in FAR_NATS:
        sums[f"mismatch/over_{nats:g}"] = (distance > nats).sum().to(delta.dtype)
    for lag in range(MAX_LAG + 1):
        here = trainable & ((lags == lag) if lag < MAX_LAG else (lags >= MAX_LAG))
        sums[f"lag{lag}/tokens"] = here.sum().to(delta.dtype)
        sums[f"lag{lag}/abs"] = (distance * here).sum()
    return sums


def summarise_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Turn the sums of a whole step into what one reads: means per token, shares, sample size.

    Args:
        sums: metrics of all parts of a step, added.

    Returns:
        Every sum divided by the tokens it is over; ``tokens`` as it is; and
        ``mismatch/effective_share`` = (Σw)² / (n Σw²), 1 for identical policies. Means over no
        token at all are left out.
    """
    tokens = float(sums.get("tokens", 0.0))
    report = {"tokens": tokens}
    for name, value in sums.items():
        lag, _, measure = name.partition("/")
        count = tokens
        if lag.startswith("lag") and measure == "abs":
            count = float(sums[f"{lag}/tokens"])
        if name != "tokens" and count > 0:
            report[name] = float(value) / count
    weight, squared = report.pop("mismatch/weight", 0.0), report.pop("mismatch/weight_squared", 0.0)
    if squared > 0 and math.isfinite(squared):
        report["mismatch/effective_share"] = weight**2 / squared
    return report
