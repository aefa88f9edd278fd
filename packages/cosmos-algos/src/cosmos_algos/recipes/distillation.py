"""Distillation on given answers: the student's distributions towards a teacher's, token by token.

Hinton et al., arXiv 1503.02531, with the divergence of GKD, arXiv 2306.13649, eq. 1.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from cosmos_algos.distillation import TopK, generalised_jsd, top_k, top_k_jsd
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

    def likeliest(self, teacher: Float[Tensor, "N V"]) -> TopK | None:
        """Return all that the loss needs of a teacher's logits; ``None`` if it needs them all."""
        if not 0 < self.top_k < teacher.shape[-1]:
            return None
        return top_k(accurate(teacher), self.top_k, temperature=self.temperature)

    def token_losses(
        self,
        teacher: Float[Tensor, "N V"] | TopK,
        student: Float[Tensor, "N V"],
        targets: Int[Tensor, " N"],
    ) -> Float[Tensor, " N"]:
        """Return the loss of each token.

        Args:
            teacher: logits, or what ``likeliest`` made of them.
            student: logits, with gradient.
            targets: the answer's tokens.

        Raises:
            AlgorithmConfigError: if the logits of the two have not the same vocabulary.
        """
        mine = torch.log_softmax(accurate(student) / self.temperature, dim=-1)
        goal = teacher if isinstance(teacher, TopK) else self._goal(teacher, student)
        if isinstance(goal, TopK):
            losses = top_k_jsd(goal.logprobs, mine.gather(-1, goal.token_ids), self.beta)
        else:
            losses = generalised_jsd(goal, mine, self.beta)
        if self.likelihood_coefficient:
            likelihood = cross_entropy(accurate(student), targets, reduction="none")
            losses = losses + self.likelihood_coefficient * likelihood
        return losses

    def _goal(self, teacher: Tensor, student: Tensor) -> Tensor | TopK:
        """Return the teacher's likeliest tokens, or the log-probabilities of all."""
        check_one_vocabulary(teacher.shape[-1], student.shape[-1])
        few = self.likeliest(teacher)
        if few is not None:
            return few
        return torch.log_softmax(accurate(teacher) / self.temperature, dim=-1)


def check_one_vocabulary(teacher: int, student: int) -> None:
    """Check that two models have as many logits.

    Raises:
        AlgorithmConfigError: if they have not.
    """
    if teacher != student:
        raise AlgorithmConfigError(
            f"distillation: the teacher knows {teacher} tokens and the student {student}; they "
            "need one vocabulary"
        )
