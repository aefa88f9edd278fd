"""Learning-rate schedules, as config: a factor for every update."""

import math
from dataclasses import dataclass
from typing import Literal

from cosmos_core.choices import check_choice

Shape = Literal["constant", "cosine", "linear", "wsd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Factor on the learning rate: linear warm-up, then a shape.

    Attributes:
        shape: ``constant``; ``cosine`` or ``linear`` decay from 1 to ``final_factor``; or ``wsd``
            (warm-up, stable, decay; Hu et al., 2024): 1 until the last ``num_decay_steps``, then
            linear decay.
        num_warmup_steps: updates over which the factor rises; update i of w has (i + 1) / w.
        num_steps: update at which the decay ends; unused by ``constant``.
        final_factor: factor from then on.
        num_decay_steps: length of the decay of ``wsd``.
    """

    shape: Shape = "constant"
    num_warmup_steps: int = 0
    num_steps: int = 0
    final_factor: float = 0.0
    num_decay_steps: int = 0

    def __post_init__(self) -> None:
        """Check the numbers against each other.

        Raises:
            ValueError: if there is no such shape, or a decay has no steps left after the warm-up,
                or ends below 0.
        """
        check_choice("shape of a schedule", self.shape, Shape)
        if self.num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps is {self.num_warmup_steps}; it must be 0 or more")
        if not 0.0 <= self.final_factor < math.inf:
            raise ValueError(f"final_factor is {self.final_factor}; it must be 0 or more")
        if self.shape != "constant" and self.num_steps <= self.num_warmup_steps:
            raise ValueError(
                f"a {self.shape} schedule needs num_steps above num_warmup_steps "
                f"({self.num_warmup_steps}); found {self.num_steps}"
            )
        longest = self.num_steps - self.num_warmup_steps
        if self.shape == "wsd" and not 1 <= self.num_decay_steps <= longest:
            raise ValueError(
                f"a wsd schedule needs num_decay_steps from 1 to {longest}, what the warm-up "
                f"leaves; found {self.num_decay_steps}"
            )

    def check_updates(self, num_updates: int) -> None:
        """Check that it lasts as long as a run, or leaves a rate to go on with.

        Args:
            num_updates: that the run makes.

        Raises:
            ValueError: if the last updates would change nothing, naming the settings of a recipe.
        """
        idle = num_updates - self.num_steps
        if self.shape != "constant" and self.final_factor == 0.0 and idle > 0:
            raise ValueError(
                f"learner.optimizer.schedule.num_steps is {self.num_steps}, of {num_updates} "
                f"updates of the run: the last {idle} would have a learning rate of 0; set it to "
                f"{num_updates}, or final_factor above 0"
            )

    def factor(self, update: int) -> float:
        """Return the factor of update ``update``, counted from 0."""
        if update < self.num_warmup_steps:
            return (update + 1) / self.num_warmup_steps
        if self.shape == "constant":
            return 1.0
        start = self.num_warmup_steps
        if self.shape == "wsd":
            start = self.num_steps - self.num_decay_steps
        progress = min(max(update - start, 0) / (self.num_steps - start), 1.0)
        kept = (1 + math.cos(math.pi * progress)) / 2 if self.shape == "cosine" else 1 - progress
        return self.final_factor + (1 - self.final_factor) * kept
