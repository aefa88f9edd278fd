"""For how long validations hold the policy up: what a step says of it, and the report of a run."""

from cosmos_core.control.replicas import ReplicaTable
from cosmos_core.control.rounds import Rounds
from cosmos_core.control.state import UNKNOWN_VERSION, ControllerState
from cosmos_core.control.steps import Steps


class HeldUp:
    """All changes to ``state.held_up_s`` go through here; it adds to ``state.validated_s``."""

    def __init__(
        self, state: ControllerState, steps: Steps, replicas: ReplicaTable, rounds: Rounds
    ) -> None:
        """Go on with what is there."""
        self._state = state
        self._steps = steps
        self._replicas = replicas
        self._rounds = rounds

    def note(self, now: float) -> None:
        """Note whether a validation holds the policy up from now on."""
        state, since_s = self._state, self._state.held_up_s
        if self._is_held_up() == (since_s >= 0):
            return
        if since_s < 0:
            state.held_up_s = now
        else:
            state.validated_s += now - since_s
            state.held_up_s = -1.0

    def _is_held_up(self) -> bool:
        """Whether the policy waits while all there is to do are the answers of an open round.

        Nothing is sampled for training then, and no prompt of it may be given to anybody; nor would
        it be given to somebody soon who is about to have newer weights.
        """
        state = self._state
        if state.round is None or state.training is not None or not self._steps.policies_agree:
            return False
        if self._rounds.blocks_training:
            return True
        return not (
            self._steps.are_all_taken
            or self._steps.are_sampled_for
            or self._replicas.with_room(self._steps.may_dispatch)
            or any(replica.loading != UNKNOWN_VERSION for replica in state.rollouts())
        )
