"""Distillation on given answers: the student's distributions towards a teacher's, token by token.

Hinton et al., arXiv 1503.02531, with the divergence of GKD, arXiv 2306.13649, eq. 1.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from cosmos_algos.arguments import (
    check_coefficients,
    check_counts,
    check_fractions,
    check_scales,
)
from cosmos_algos.distillation import TopK, distillation_losses, likelihood_losses, top_k


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationConfig:
    """A generalised Jensen-Shannon divergence, and the likelihood of the answers besides.

    A teacher and a student of one tokenizer may have other numbers of padding rows. Whole
    distributions are over the tokens that both have: each softmax is over these alone, since a KL
    to what the other cannot say is infinite. With ``top_k`` each is over all of its own rows, and
    a token that the student has not is one of "all others".

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
        check_fractions("distillation", {"beta": self.beta})
        check_scales("distillation", {"temperature": self.temperature})
        check_counts("distillation", {"top_k": self.top_k})
        weights = {"likelihood_coefficient": self.likelihood_coefficient}
        check_coefficients("distillation", weights)

    def likeliest(self, teacher: Float[Tensor, "N V"]) -> TopK | None:
        """Return all that the loss needs of a teacher's logits; ``None`` if it needs them all."""
        if not 0 < self.top_k < teacher.shape[-1]:
            return None
        return top_k(teacher, self.top_k, temperature=self.temperature)

    def token_losses(
        self,
        teacher: Float[Tensor, "N V2"] | TopK,
        student: Float[Tensor, "N V"],
        targets: Int[Tensor, " N"],
    ) -> Float[Tensor, " N"]:
        """Return the loss of each token.

        Args:
            teacher: logits, or what ``likeliest`` made of them.
            student: logits, with gradient.
            targets: the answer's tokens.
        """
        goal = teacher if isinstance(teacher, TopK) else self.likeliest(teacher) or teacher
        losses = distillation_losses(goal, student, self.beta, temperature=self.temperature)
        if self.likelihood_coefficient:
            losses = losses + self.likelihood_coefficient * likelihood_losses(student, targets)
        return losses
