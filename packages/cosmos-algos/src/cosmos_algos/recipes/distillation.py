"""Distillation on given answers: the student's distributions towards a teacher's, token by token.

Hinton et al., arXiv 1503.02531, with the divergence of GKD, arXiv 2306.13649, eq. 1.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from cosmos_algos.distillation import generalised_jsd, top_k, top_k_jsd
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.logprobs import accurate


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationConfig:
    """A generalised Jensen-Shannon divergence, and the likelihood of the answers besides.

    Attributes:
        beta: 0 is KL(teacher || student), 1 KL(student || teacher), between them the mixture's.
        top_k: compare the teacher's likeliest tokens and all others as one; 0 for the whole
            distributions.
        temperature: logits of both are divided by it.
        likelihood_coefficient: weight of -log π(y_t) of the answers.
    """

    kind: Literal["distillation"] = "distillation"
    beta: float = 0.0
    top_k: int = 0
    temperature: float = 1.0
    likelihood_coefficient: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is outside its range."""
        if not 0.0 <= self.beta <= 1.0 or self.top_k < 0 or self.temperature <= 0.0:
            raise AlgorithmConfigError(
                f"distillation: beta {self.beta} must be in [0, 1], top_k {self.top_k} 0 or more "
                f"and temperature {self.temperature} above 0"
            )

    def token_losses(
        self,
        teacher: Float[Tensor, "N V"],
        student: Float[Tensor, "N V"],
        targets: Int[Tensor, " N"],
    ) -> Float[Tensor, " N"]:
        """Return the loss of each token.

        Args:
            teacher: logits.
            student: logits, with gradient.
            targets: the answer's tokens.

        Raises:
            AlgorithmConfigError: if the two have not the same vocabulary.
        """
        if teacher.shape != student.shape:
            raise AlgorithmConfigError(
                f"distillation: the teacher knows {teacher.shape[-1]} tokens and the student "
                f"{student.shape[-1]}; they need one vocabulary"
            )
        mine = torch.log_softmax(accurate(student) / self.temperature, dim=-1)
        if 0 < self.top_k < teacher.shape[-1]:
            likeliest = top_k(accurate(teacher), self.top_k, temperature=self.temperature)
            losses = top_k_jsd(likeliest.logprobs, mine.gather(-1, likeliest.token_ids), self.beta)
        else:
            whole = torch.log_softmax(accurate(teacher) / self.temperature, dim=-1)
            losses = generalised_jsd(whole, mine, self.beta)
        if self.likelihood_coefficient:
            likelihood = cross_entropy(accurate(student), targets, reduction="none")
            losses = losses + self.likelihood_coefficient * likelihood
        return losses
