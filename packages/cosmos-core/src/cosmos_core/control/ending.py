"""The end of a run: when it has come, what the last checkpoint holds, and whether that was saved.

::

    all steps done, or a stop asked for ─► cut, Stop to all ─► all have saved, or left ─► end

A stop waits for the step in hand, but not for policy replicas that it lacks and that stay away.
Then the cut is of before the step, unless somebody has its weights; who turns out to have them
later is given another cut, since with this one its groups would be trained on again.
"""

from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.cut import cut_before
from cosmos_core.control.rounds import Rounds
from cosmos_core.control.state import ControllerState, ReplicaState
from cosmos_core.control.steps import Steps
from cosmos_core.messages import CheckpointSaved, Stop

ALL_DONE = "all steps done"
STOPPED = "stopped"
LOST = "policy replicas died before the last weights were saved"


class Ending:
    """All changes to ``state.stop``, ``stop_saved`` and ``finished`` go through here."""

    def __init__(
        self, state: ControllerState, config: ControllerConfig, steps: Steps, rounds: Rounds
    ) -> None:
        """Go on with what is there."""
        self._state = state
        self._lacks_s = config.first_lease_s
        self._steps = steps
        self._rounds = rounds

    @property
    def is_due(self) -> bool:
        """Whether nothing is left to do but to save."""
        state = self._state
        if state.stop is not None:
            return True
        if state.stopping:
            own = state.endurance
            is_given_up = own.gives_up_step or own.lacking_s >= self._lacks_s
            return state.training is None or not state.policies() or is_given_up
        if state.training is not None or not self._steps.are_all_taken:
            return False
        return state.round is None and not self._rounds.final_is_missing

    def begin(self, now: float) -> list[tuple[str, Stop]]:
        """Cut the stream and return the order to each replica, once; later what has changed."""
        state = self._state
        if state.stop is not None:
            return self._settle(now)
        state.stopping = state.stopping or ALL_DONE
        self._steps.commit_if_kept(now)
        self._cut(now)
        return [(name, self._order()) for name in state.replicas]

    def orders_for(self, joined: ReplicaState, now: float) -> list[tuple[str, Stop]]:
        """Return the order to a replica that joined meanwhile, maybe with older weights.

        And to those that were ahead of the cut before, and wait for another.
        """
        step = self._state.step
        self._cut(now)
        told = [joined] if self._state.step == step else [joined, *self._ahead_of(step, joined)]
        return [(replica.name, self._order()) for replica in told]

    def _settle(self, now: float) -> list[tuple[str, Stop]]:
        """Commit the step that was in hand if somebody turns out to have its weights.

        Whoever has weights that are newer than its cut saves nothing, and waits for the order that
        this returns.
        """
        state, step = self._state, self._state.step
        if not self._steps.commit_if_kept(now):
            return []
        state.stop_saved = False
        state.stop = cut_before(state)
        return [(policy.name, self._order()) for policy in self._ahead_of(step)]

    def hear(self, replica: ReplicaState, saved: CheckpointSaved) -> None:
        """Note that a replica has done its part; only one that names a path has saved anything."""
        state = self._state
        replica.stopped = state.stop is not None and saved.step >= state.step - 1
        if saved.path:
            self._steps.saved(saved.step)
            state.stop_saved |= replica.stopped

    def finish_if_done(self) -> None:
        """End the run when no policy replica has anything left to save."""
        state = self._state
        if not all(policy.stopped for policy in state.policies()):
            return
        self._steps.abandon()
        is_lost = not state.stop_saved and bool(state.consumed_since_save)
        state.finished = self._with_loss() if is_lost else state.stopping

    def _cut(self, now: float) -> None:
        """Cut the stream where the policy replicas are, who may be back with older weights."""
        state = self._state
        oldest = min(self._steps.versions_held(), default=state.step)
        if oldest < state.step:
            oldest = max(oldest, state.saved)  # who has older weights has nothing to save
            self._rounds.forget_after(oldest)
            self._steps.rewind(oldest, now)
            state.stopping = self._with_loss()
        state.stop = cut_before(state)

    def _ahead_of(self, step: int, *others: ReplicaState) -> list[ReplicaState]:
        return [p for p in self._state.policies() if p.version > step and p not in others]

    def _with_loss(self) -> str:
        """Return why the run ends, now that steps which were taken are in no checkpoint."""
        stopping = self._state.stopping
        if stopping == ALL_DONE:
            return LOST
        return stopping if stopping.endswith(LOST) else f"{stopping}; {LOST}"

    def _order(self) -> Stop:
        return Stop(reason=self._state.stopping, cut=self._state.stop or b"")
