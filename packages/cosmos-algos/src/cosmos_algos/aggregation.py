"""How per-token losses become the loss of a step, as weights that are fixed before anything else.

A step's loss is Σ_i w_i Σ_t l_it / Σ_i d_i over all its samples: ``w`` weighs each trained token
of sample i, ``d`` is what the sample adds to the denominator. Both follow from lengths and groups
of the *whole* step, hence neither micro-batches, nor ranks, nor masks applied later change them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from cosmos_algos.advantages import group_ids
from cosmos_algos.arguments import check_choice, check_lengths, check_whole
from cosmos_algos.errors import AlgorithmConfigError, ShapeError

AggregationMode = Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregationConfig:
    """Which mean over tokens a step's loss is.

    With N trained tokens in B samples, T_i of them in sample i and N_g in its group:

    * ``token_mean``: Σ_i Σ_t l / N (DAPO, arXiv 2503.14476, eq. 8).
    * ``sequence_mean``: (1/B) Σ_i (1/T_i) Σ_t l (GRPO, arXiv 2402.03300, eq. 3).
    * ``sequence_sum``: (1/B) Σ_i Σ_t l, as Σ_t log π is the sample's (RLOO, arXiv 2402.14740).
    * ``constant``: (1/(B C)) Σ_i Σ_t l (Dr. GRPO, arXiv 2503.20783).
    * ``prompt_mean``: (1/P) Σ_g (1/N_g) Σ_{i in g} Σ_t l over P groups (ScaleRL,
      arXiv 2510.13786).

    Attributes:
        mode: one of the above.
        constant: C, usually the longest response allowed; for mode ``constant`` only.
    """

    mode: AggregationMode = "token_mean"
    constant: int = 0

    def __post_init__(self) -> None:
        """Refuse a constant without its mode, and the mode without a constant."""
        check_choice("aggregation: mode", self.mode, AggregationMode)
        if (self.mode == "constant") != (self.constant > 0):
            raise AlgorithmConfigError(
                f"aggregation: mode {self.mode!r} with constant {self.constant}; "
                "mode 'constant' needs a positive constant and no other mode takes one"
            )


class SampleWeights(NamedTuple):
    """For each sample of a step what its tokens weigh.

    Attributes:
        token: weight of the loss of each of its tokens.
        denominator: its share of the denominator.
        imitation: weight of the negative log-likelihood of each of its tokens, if there is one.
    """

    token: Float64[Tensor, " N"]
    denominator: Float64[Tensor, " N"]
    imitation: Float64[Tensor, " N"] | None = None

    def select(self, rows: Sequence[int] | Tensor) -> "SampleWeights":
        """Return the entries of some samples, given by their numbers.

        Raises:
            ShapeError: if rows are a mask, whose truth values would be taken for numbers 0 and 1.
        """
        picked = torch.as_tensor(rows, device=self.token.device)
        if picked.numel():
            check_whole("weights: rows", picked)
        picked = picked.long()
        imitation = None if self.imitation is None else self.imitation[picked]
        return SampleWeights(self.token[picked], self.denominator[picked], imitation)


def check_entries(weights: SampleWeights, num_samples: int) -> None:
    """Refuse weights of other samples than a batch has.

    Raises:
        ShapeError: names both numbers.
    """
    found = {len(entry) for entry in weights if entry is not None}
    if found != {num_samples}:
        raise ShapeError(
            f"collate: weights of {', '.join(map(str, sorted(found)))} samples for {num_samples}; "
            "take those of the batch: weights.select(rows)"
        )


def sample_weights(
    num_tokens: Sequence[int] | Tensor,
    groups: Sequence[Hashable] | Tensor,
    config: AggregationConfig,
) -> SampleWeights:
    """Return the weights of all samples of a step; a sample without trained tokens weighs 0.

    Example:
        >>> sample_weights([1, 3], ["a", "a"], AggregationConfig(mode="sequence_mean"))
        SampleWeights(token=tensor([1.0000, 0.3333], ...), denominator=tensor([1., 1.], ...), ...)

    Args:
        num_tokens: trained tokens of each sample, of the whole step and not of a share of it.
        groups: the group of each sample.
        config: which mean.

    Raises:
        ShapeError: if there are more or fewer groups than samples.
    """
    check_lengths("weights", {"token counts": num_tokens, "group entries": groups})
    tokens = torch.as_tensor(num_tokens, dtype=torch.float64, device="cpu")
    if tokens.dim() != 1:
        raise ShapeError(f"weights: token counts {tuple(tokens.shape)}; they must be [N]")
    trained = (tokens > 0).double()
    match config.mode:
        case "token_mean":
            return SampleWeights(trained, tokens)
        case "sequence_mean":
            return SampleWeights(trained / tokens.clamp(min=1), trained)
        case "sequence_sum":
            return SampleWeights(trained, trained)
        case "constant":
            return SampleWeights(trained / config.constant, trained)
        case "prompt_mean":
            ids = group_ids(groups)
            sums = tokens.new_zeros(len(num_tokens)).index_add(0, ids, tokens)[ids]
            return SampleWeights(trained / sums.clamp(min=1), tokens / sums.clamp(min=1))


def imitation_weights(
    num_tokens: Sequence[int],
    rewards: Sequence[float],
    weights: SampleWeights,
    coefficient: float,
    threshold: float = 0.0,
) -> SampleWeights:
    """Add the negative log-likelihood of positive samples to the weights of a step.

    L + μ Σ_{i: R_i > threshold} Σ_t -log π / Σ_{i: R_i > threshold} T_i (VAPO, arXiv 2504.05118,
    section 4.3): the second mean has a count of its own, which is the *whole step's*; as the sum
    of a step is divided by Σ_i d_i, each token weighs μ Σ_i d_i / Σ_positive T_i.

    Args:
        num_tokens: trained tokens of each sample.
        rewards: of each sample; NaN for a failed one.
        weights: of the loss itself.
        coefficient: μ.
        threshold: a reward above it makes a sample positive.

    Raises:
        ShapeError: if there is not one reward and weight for each sample.
    """
    columns = {"token counts": num_tokens, "rewards": rewards, "weights": weights.token}
    check_lengths("imitation", columns)
    tokens = torch.tensor(num_tokens, dtype=torch.float64)
    positive = (torch.tensor(rewards, dtype=torch.float64) > threshold) & (tokens > 0)
    count = (tokens * positive).sum().clamp(min=1.0)
    scale = coefficient * weights.denominator.sum() / count
    return weights._replace(imitation=scale * positive)
