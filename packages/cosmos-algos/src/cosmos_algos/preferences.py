"""Losses from preferences between whole samples: DPO, IPO, KTO and reward models.

Each takes numbers of samples, such as Σ_t log π of a response, and returns a loss per sample or
per pair.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from cosmos_algos.arguments import check_mask, check_same_shape
from cosmos_algos.errors import AlgorithmConfigError, ShapeError


def dpo_losses(
    chosen_ratios: Float[Tensor, " P"],
    rejected_ratios: Float[Tensor, " P"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Tensor, " P"]:
    """Return -(1-ε) log σ(β(h_c - h_r)) - ε log σ(-β(h_c - h_r)), h = log π(y|x) - log π_ref(y|x).

    DPO (arXiv 2305.18290, eq. 7); ε > 0 is conservative DPO: labels wrong with probability ε.

    Args:
        chosen_ratios: h of the preferred samples, summed over tokens.
        rejected_ratios: h of the others.
        beta: how far the policy may go from the reference; larger is less far.
        label_smoothing: ε.

    Raises:
        AlgorithmConfigError: if ``label_smoothing`` is not in [0, 0.5).
        ShapeError: if there are not as many of both.
    """
    check_label_smoothing(label_smoothing)
    check_same_shape("dpo", {"chosen": chosen_ratios, "rejected": rejected_ratios})
    margin = beta * (chosen_ratios - rejected_ratios)
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def check_label_smoothing(label_smoothing: float) -> None:
    """Refuse what is no probability that a label is wrong: of more than half, all are turned round.

    Raises:
        AlgorithmConfigError: if it is not in [0, 0.5).
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise AlgorithmConfigError(f"dpo: label_smoothing {label_smoothing} must be in [0, 0.5)")


def ipo_losses(
    chosen_ratios: Float[Tensor, " P"], rejected_ratios: Float[Tensor, " P"], *, beta: float
) -> Float[Tensor, " P"]:
    """Return (h_c - h_r - 1/(2β))², h the *mean* log-ratio over a sample's tokens.

    IPO (arXiv 2310.12036, eq. 17); the authors' average over tokens keeps 1/(2β) in reach for
    samples of any length.

    Raises:
        AlgorithmConfigError: if ``beta`` is not above 0.
        ShapeError: if there are not as many of both.
    """
    if not beta > 0.0:
        raise AlgorithmConfigError(f"ipo: beta is {beta}; the margin is 1/(2β), so above 0")
    check_same_shape("ipo", {"chosen": chosen_ratios, "rejected": rejected_ratios})
    return (chosen_ratios - rejected_ratios - 1.0 / (2.0 * beta)) ** 2


def kto_losses(
    ratios: Float[Tensor, " B"],
    desirable: Bool[Tensor, " B"],
    baseline: Float[Tensor, ""],
    *,
    beta: float,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Float[Tensor, " B"]:
    """Return λ_D (1 - σ(β(h - z))) or λ_U (1 - σ(β(z - h))), h = log π(y|x) - log π_ref(y|x).

    KTO (arXiv 2402.01306, eq. 8).

    Args:
        ratios: h, summed over tokens.
        desirable: which samples are good.
        baseline: z, an estimate of KL(π‖π_ref) over the *whole* step; see ``kto_baseline``.
        beta: aversion to risk.
        weights: λ_D and λ_U.

    Raises:
        ShapeError: if there is not one label for each sample, labels are numbers, or the
            baseline is several.
    """
    check_mask("kto: desirable", desirable)
    check_same_shape("kto", {"ratios": ratios, "desirable": desirable})
    if baseline.numel() != 1:
        raise ShapeError(f"kto: baseline {tuple(baseline.shape)}; it is one number for the step")
    gap = beta * (ratios - baseline.detach().to(ratios.dtype))
    good = weights[0] * (1.0 - torch.sigmoid(gap))
    bad = weights[1] * (1.0 - torch.sigmoid(-gap))
    return torch.where(desirable, good, bad)


def kto_baseline(total: Float[Tensor, ""], count: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Return z = max(0, Σ h / n) over samples paired with prompts of others (eq. 8).

    Sum and count add over micro-batches and ranks, so z does not depend on the split.
    """
    return (total / count.clamp(min=1)).clamp(min=0.0)


def bradley_terry_losses(
    chosen_rewards: Float[Tensor, " P"],
    rejected_rewards: Float[Tensor, " P"],
    *,
    margins: Float[Tensor, " P"] | None = None,
    centering: float = 0.0,
) -> Float[Tensor, " P"]:
    """Return -log σ(r_c - r_r - m) + c (r_c + r_r)².

    Reward modelling (InstructGPT, arXiv 2203.02155, eq. 1), with the margin of Llama 2
    (arXiv 2307.09288, eq. 2) and a term that keeps rewards around 0 (arXiv 2312.09244).

    Args:
        chosen_rewards: r of the preferred samples.
        rejected_rewards: r of the others.
        margins: m, how clear each preference is; 0 by default.
        centering: c.

    Raises:
        ShapeError: if there are not as many of all.
    """
    tensors = {"chosen": chosen_rewards, "rejected": rejected_rewards}
    check_same_shape(
        "bradley-terry", tensors if margins is None else {**tensors, "margins": margins}
    )
    gap = chosen_rewards - rejected_rewards
    if margins is not None:
        gap = gap - margins
    return -logsigmoid(gap) + centering * (chosen_rewards + rejected_rewards) ** 2
