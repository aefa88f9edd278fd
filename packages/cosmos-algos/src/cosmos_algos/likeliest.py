"""What a teacher finds likeliest in place of each sampled token, as part of a policy's loss."""

from dataclasses import dataclass

from cosmos_algos.batch import TokenBatch
from cosmos_algos.distillation import TopK
from cosmos_algos.errors import AlgorithmConfigError, MissingScoresError


@dataclass(frozen=True, kw_only=True, slots=True)
class LikeliestConfig:
    """A divergence from a teacher's K likeliest tokens and all others as one.

    Attributes:
        top_k: how many of the teacher's likeliest tokens.
        beta: 0 is KL(teacher || student), 1 KL(student || teacher), between them the mixture's.
        coefficient: weight in the loss of each token.
    """

    top_k: int
    beta: float
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is outside its range."""
        if self.top_k < 1 or not 0.0 <= self.beta <= 1.0:
            raise AlgorithmConfigError(
                f"on_policy_distillation: top_k {self.top_k} must be 1 or more and beta "
                f"{self.beta} in [0, 1]"
            )

    def of_batch(self, batch: TokenBatch) -> TopK:
        """Return what the teacher said of a batch; a batch that trains nothing needs no word of it.

        Raises:
            MissingScoresError: if the batch has other numbers of tokens, or none.
        """
        logprobs, token_ids = batch.teacher_top_logprobs, batch.teacher_top_token_ids
        if logprobs is None or token_ids is None:
            if not batch.trainable.any():
                shape = (*batch.trainable.shape, self.top_k)
                return TopK(
                    batch.behaviour_logprobs.new_zeros(shape), batch.targets.new_zeros(shape)
                )
            found = "has none"
        elif logprobs.shape[-1] != self.top_k:
            found = f"has {logprobs.shape[-1]} of each"
        else:
            return TopK(logprobs, token_ids)
        first = f" (first sample: {batch.names[0]})" if batch.names else ""
        raise MissingScoresError(
            f"on_policy_distillation: top_k {self.top_k} needs as many of the teacher's likeliest "
            f"tokens; the batch {found}{first}"
        )
