"""Distillation on given answers: the student's distributions towards a teacher's, token by token.

Hinton et al., arXiv 1503.02531, with the divergence of GKD, arXiv 2306.13649, eq. 1.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from cosmos_algos.arguments import check_coefficients
from cosmos_algos.distillation import TopK, generalised_jsd, known_logprobs, top_k, top_k_jsd
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.output_head import accurate


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
        weights = {
            "temperature": self.temperature,
            "likelihood_coefficient": self.likelihood_coefficient,
        }
        check_coefficients("distillation", weights)
        if not 0.0 <= self.beta <= 1.0 or self.top_k < 0 or self.temperature == 0.0:
            raise AlgorithmConfigError(
                f"distillation: beta {self.beta} must be in [0, 1], top_k {self.top_k} 0 or more "
                f"and temperature {self.temperature} above 0"
            )

    def likeliest(self, teacher: Float[Tensor, "N V"]) -> TopK | None:
        """Return all that the loss needs of a teacher's logits; ``None`` if it needs them all."""
        if not 0 < self.top_k < teacher.shape[-1]:
            return None
        return top_k(accurate(teacher), self.top_k, temperature=self.temperature)

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
        if isinstance(goal, TopK):
            mine = known_logprobs(self._logprobs(student), goal.token_ids)
            losses = top_k_jsd(goal.logprobs, mine, self.beta)
        else:
            shared = min(goal.shape[-1], student.shape[-1])
            theirs, mine = (self._logprobs(logits[..., :shared]) for logits in (goal, student))
            losses = generalised_jsd(theirs, mine, self.beta)
        if self.likelihood_coefficient:
            likelihood = cross_entropy(accurate(student), targets, reduction="none")
            losses = losses + self.likelihood_coefficient * likelihood
        return losses

    def _logprobs(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        return torch.log_softmax(accurate(logits) / self.temperature, dim=-1)
