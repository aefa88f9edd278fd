"""When held-out prompts are answered, and how."""

from dataclasses import dataclass, replace

from cosmos_app.ranges import require_at_least
from cosmos_core.control import ValidationPlan
from cosmos_rollout import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """Answers to held-out prompts.

    Attributes:
        prompts: how many, from the start of the held-out rows; 0 for all of them.
        samples: answers to each; their mean reward is reported and, of several, that of the best.
        temperature: of the softmax; 0 takes the likeliest token each time.
        top_p: nucleus sampling; 1 for none.
        max_new_tokens: longest answer; 0 for that of ``rollout.sampling``.
        before: validate the first weights.
        after: validate the last weights.
        every: steps between validations in between; 0 for none. Training goes on meanwhile, by
            the samples of the rollout replicas that do not answer: half of them do at most. One
            replica alone answers with half of its places, and training goes on for
            ``staleness.bound`` steps and one more; then it waits for the rest of the answers. One
            that falls due while another is answered is left out.
    """

    prompts: int = 0
    samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 0
    before: bool = True
    after: bool = True
    every: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: naming what is out of range, or if all answers to a prompt were the same.
        """
        require_at_least(self, {"prompts": 0, "every": 0, "samples": 1, "max_new_tokens": 0})
        Sampling(temperature=self.temperature, top_p=self.top_p)
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples} and temperature 0: all answers to a prompt would be "
                "the same; set validation.temperature, to 1.0 for instance, or samples=1"
            )

    def plan(self, num_held_out: int) -> ValidationPlan:
        """Return what the controller knows of it."""
        return ValidationPlan(
            num_prompts=min(self.prompts or num_held_out, num_held_out),
            num_samples=self.samples,
            before=self.before,
            after=self.after,
            every=self.every,
        )

    def sampling(self, trained: Sampling) -> Sampling:
        """Return how answers are sampled, given how samples that are trained on are."""
        return replace(
            trained,
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens or trained.max_new_tokens,
        )
