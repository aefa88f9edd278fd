"""How long a run goes on that gets no further: then it is stopped, and says what is missing.

A clean end, as if somebody had asked for it: checkpoint, books and report are those of any other.
Which limit it was is told by how the reason begins.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from cosmos_core.control.state import (
    UNKNOWN_VERSION,
    ControllerState,
    EnduranceState,
    ReplicaState,
)
from cosmos_core.messages import SampleRef

UNREWARDED = "no sample has a reward"
EQUAL = "no group has rewards that differ"
FAILING = "nothing but failures"
STANDSTILL = "the run gets no further"
DEADLY = "policy replicas do not survive"
_FEWEST_FAILED = 3
_FOR_EACH_IN_WORK = 20
_LONGEST_EXCUSE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class EnduranceConfig:
    """When a run ends that gets no further; each limit is off at 0.

    Seconds are those in which a controller runs and reaches Redis; they begin anew with every group
    that could be trained on.

    Attributes:
        unrewarded_samples: so many samples at the beginning of a run, or of its resumption, all of
            which a reward raised at or gave no finite number: it is not what its author meant. A
            reward that takes too long, or whose service is away, is waited for instead.
        unrewarded_in_a_row: the same of a reward that has given some sample a number before: so
            many samples since then. What was in work when they began is waited for, as one replica
            whose rewards are broken may fail faster than others sample.
        equal_groups: so many groups in a row whose rewards were all equal, where
            ``trainer.drop_zero_signal`` drops such groups; and 20 for each that is in work.
        failing_s: seconds for which groups were tried, and each that came back had failed, while
            nothing was trained: a reward service or an engine that is away and does not come back.
            Groups in work that take longer are waited for, up to four times as long.
        standstill_s: seconds in which nobody had anything to do: a replica that does not join,
            weights that nobody can load. Not while somebody has scaled rollouts to none. A recipe
            refuses less than a load of weights, or a replica's start, may take.
        step_attempts: so many attempts in a row at one step, or at it and those before it, in each
            of which a policy replica died.
    """

    unrewarded_samples: int = 64
    unrewarded_in_a_row: int = 1024
    equal_groups: int = 1000
    failing_s: float = 3600.0
    standstill_s: float = 14400.0
    step_attempts: int = 20

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: naming the limit that is negative or not finite.
        """
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{limit.name} is {value}; it must be 0 (for no limit) or more")


@dataclass(frozen=True, slots=True)
class AtWork:
    """What is being done.

    Attributes:
        num_generating: groups in work.
        is_training: whether a step is in hand, and the policy replicas that it needs are there.
    """

    num_generating: int
    is_training: bool


class Endurance:
    """All changes to ``state.endurance`` go through here; it may set ``state.stopping``."""

    def __init__(self, state: ControllerState, config: EnduranceConfig) -> None:
        """Go on with what is there."""
        self._state = state
        self._config = config

    @property
    def _own(self) -> EnduranceState:
        return self._state.endurance

    # ---------------------------------------------------------------- what happens

    def note_samples(self, samples: Sequence[SampleRef]) -> None:
        """Look who has a reward among samples that were waited for."""
        own, limit = self._own, self._config.unrewarded_samples
        if any(sample.status == "completed" for sample in samples):
            own.has_reward, own.unrewarded_in_a_row = True, 0
            own.row_since_s, own.is_row_of_all = -1.0, False
            return
        unrewarded = [sample for sample in samples if sample.unrewarded_by]
        if not unrewarded:
            return
        own.last_unrewarded_by = unrewarded[-1].unrewarded_by
        own.last_unrewarded = unrewarded[-1].failure
        if own.has_reward:
            own.unrewarded_in_a_row += len(unrewarded)
            return
        own.unrewarded += len(unrewarded)
        if limit and own.unrewarded >= limit:
            self._stop_unrewarded(UNREWARDED, f"first {own.unrewarded}")

    def note_sampled(self) -> None:
        """Note that a group, or a validation's answer, came back with its samples."""
        own = self._own
        own.failed, own.last_failure = 0, ""
        own.failing_s = own.still_s = 0.0

    def note_failed(self, reason: str) -> None:
        """Note that an attempt at a group came to nothing."""
        own = self._own
        own.failed += 1
        own.last_failure = reason
        own.still_s = 0.0

    def note_equal(self, num_generating: int) -> None:
        """Note that a group was dropped for rewards that are all equal.

        Args:
            num_generating: groups in work: those that are worth something may take longer than all
                of those that are not.
        """
        state, limit = self._state, self._config.equal_groups
        state.equal_in_a_row += 1
        if limit and state.equal_in_a_row >= max(limit, _FOR_EACH_IN_WORK * num_generating):
            self._stop(
                f"{EQUAL}: those of the last {state.equal_in_a_row} in a row were all equal, and "
                "trainer.drop_zero_signal drops such groups"
            )

    def note_ordered(self) -> None:
        """Note that a step was ordered: formed, or given again to a policy replica that joined."""
        self._own.is_tried = True

    def note_death(self, replica: ReplicaState, reason: str) -> None:
        """Note a death: that of a policy replica ends an attempt at the step in hand, once."""
        own, state, limit = self._own, self._state, self._config.step_attempts
        if replica.role != "policy" or state.training is None or not own.is_tried:
            return
        own.is_tried = False
        if state.step > own.deadly_step:
            own.deadly_step, own.deaths = state.step, 0
        own.deaths += 1
        if limit and own.deaths >= limit:
            last = f"the last with that of {replica.name}: {reason}"
            self._give_up(
                f"{DEADLY} step {own.deadly_step + 1}: {own.deaths} attempts in a row at it, or at "
                f"steps before it, ended with a death, {last}"
            )

    # ---------------------------------------------------------------- time that passes

    def tick(self, now: float, at_work: AtWork, waiting_for: Callable[[], str]) -> None:
        """Let time pass, and stop a run that has got no further for too long.

        Args:
            now: seconds of the controller's clock.
            at_work: what is being done.
            waiting_for: says what the run waits for.
        """
        own, config, state = self._own, self._config, self._state
        is_training = at_work.is_training
        passed_s = now - own.ticked_s if own.ticked_s >= 0 else 0.0
        own.ticked_s = now
        self._look_at_row(now)
        is_paused = state.wanted_rollouts == 0
        is_lacking = state.training is not None and not is_training
        own.lacking_s = own.lacking_s + passed_s if is_lacking else 0.0
        is_answering = state.round is not None and bool(state.round.given)
        is_sampling = is_answering or at_work.num_generating > 0
        if is_training or is_sampling or is_paused or len(state.replicas) > own.most_there:
            own.most_there, own.still_s = len(state.replicas), 0.0
        elif not self._is_loading:
            own.still_s += passed_s
        is_trying = is_sampling or any(replica.resting for replica in state.rollouts())
        if own.failed and is_trying and not is_training and not is_paused:
            own.failing_s += passed_s
        if 0 < config.standstill_s <= own.still_s:
            self._give_up(
                f"{STANDSTILL}: for {own.still_s:.0f} s it has waited for {waiting_for()}"
            )
        elif self._fails_too_long(now):
            self._stop(
                f"{FAILING} for {own.failing_s:.0f} s: {own.failed} attempts at prompts in a row, "
                f"the last with: {own.last_failure}"
            )

    def _look_at_row(self, now: float) -> None:
        """Stop a run whose samples have no reward any more, whoever sampled them."""
        own, limit = self._own, self._config.unrewarded_in_a_row
        if not limit or not own.unrewarded_in_a_row:
            return
        if own.row_since_s < 0:
            own.row_since_s = now
        own.is_row_of_all = own.is_row_of_all or not self._is_in_work_since(own.row_since_s)
        if own.is_row_of_all and own.unrewarded_in_a_row >= limit:
            self._stop_unrewarded(f"{UNREWARDED} any more", f"last {own.unrewarded_in_a_row}")

    def _is_in_work_since(self, time_s: float) -> bool:
        """Whether anything is in work that was given to a rollout replica before that time."""
        opened = self._state.round
        if opened is not None and opened.given and opened.since_s <= time_s:
            return True
        groups = self._state.groups.values()
        return any(group.stage == "generating" and group.since_s <= time_s for group in groups)

    @property
    def _is_loading(self) -> bool:
        """Whether weights are on their way, but for those that have failed to arrive before."""
        return any(
            replica.loading != UNKNOWN_VERSION and not replica.failed_loads
            for replica in self._state.rollouts()
        )

    def _fails_too_long(self, now: float) -> bool:
        """Whether all attempts have failed for too long, and none in work may yet be another."""
        own, limit_s, opened = self._own, self._config.failing_s, self._state.round
        if not 0 < limit_s <= own.failing_s or own.failed < _FEWEST_FAILED:
            return False
        if own.failing_s >= _LONGEST_EXCUSE * limit_s:
            return True
        if opened is not None and opened.given and now - opened.since_s < 2 * limit_s:
            return False
        groups = self._state.groups.values()
        return not any(g.stage == "generating" and 2 * (now - g.since_s) > limit_s for g in groups)

    def _stop_unrewarded(self, what: str, which: str) -> None:
        own = self._own
        self._stop(
            f"{what}: '{own.last_unrewarded_by}' gave none of the {which} a finite number; of the "
            f"last it is said: {own.last_unrewarded}"
        )

    def _give_up(self, reason: str) -> None:
        self._stop(reason)
        self._own.gives_up_step = True

    def _stop(self, reason: str) -> None:
        self._state.stopping = self._state.stopping or reason
