"""A validation outside of any run: one replica answers held-out prompts, by weights that stay.

What it gives out, tries again and adds up is what a run's controller would.
"""

from collections.abc import Sequence
from dataclasses import replace

from cosmos_core.control.config import ControllerConfig, ValidationPlan
from cosmos_core.control.endurance import Endurance
from cosmos_core.control.replicas import ReplicaTable
from cosmos_core.control.rounds import Rounds
from cosmos_core.control.state import ControllerState, ValidationResult
from cosmos_core.messages import Generate, GroupFailed, GroupFinished, ReplicaJoined


class LoneRound:
    """One validation of weights that are called version 0.

    Used in this order, until there is a result::

        give_out ─► (the replica answers) ─► take_in ─► give_out ─► ...
    """

    def __init__(self, plan: ValidationPlan, *, replica: str, slots: int) -> None:
        """Nothing is given out yet.

        Args:
            plan: how many prompts, and how often each is asked.
            replica: name of who answers.
            slots: prompts that it is given at once.

        Raises:
            ValueError: if there is no prompt, or no slot.
        """
        if not plan.num_prompts:
            raise ValueError("a validation needs a prompt, found none")
        asked = replace(plan, before=True)  # whatever a run would do of its first weights
        config = ControllerConfig(
            num_steps=1, groups_per_step=1, samples_per_group=1, validation=asked
        )
        self._state = ControllerState()
        replicas = ReplicaTable(self._state, config)
        replicas.add(ReplicaJoined(replica=replica, role="rollout", slots=slots), 0.0)
        endurance = Endurance(self._state, config.endurance)
        self._rounds = Rounds(self._state, config, replicas, endurance)
        self._rounds.open_if_due(0.0)

    @property
    def num_left(self) -> int:
        """Prompts that are yet to be answered, or to fail for good."""
        opened = self._state.round
        return 0 if opened is None else len(opened.waiting) + len(opened.given)

    @property
    def rewards(self) -> Sequence[float]:
        """Mean reward of each prompt that was answered so far."""
        return () if self._state.round is None else self._state.round.rewards

    @property
    def result(self) -> ValidationResult | None:
        """What it found; ``None`` as long as prompts are left."""
        return self._state.rounds_done[-1] if self._state.rounds_done else None

    def give_out(self) -> list[Generate]:
        """Return what the replica is to be told now."""
        return [order for _, order in self._rounds.give_out(_no_training)]

    def take_in(self, event: GroupFinished | GroupFailed) -> None:
        """Take an answer in; a prompt without one is given out again, a few times."""
        self._rounds.take_in(event)


def _no_training(_: int) -> bool:
    return False
