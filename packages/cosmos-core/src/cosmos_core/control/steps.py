"""Steps: formed from ready groups, committed by all policy replicas, taken back with a checkpoint.

A step that is being trained keeps its groups until it is committed, whoever dies: a policy replica
that comes back without it gets the very same step again, so no sample is trained on twice. Only
when all policy replicas come back with older weights are steps void, and their prompts reissued.
Where policy replicas come and go (``min_policies``) the first of them to have taken a step speaks
for all of its members, which agreed on it before anything was updated.
"""

from collections.abc import Sequence

from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.cut import cut_of
from cosmos_core.control.endurance import AtWork, Endurance
from cosmos_core.control.groups import GroupTable
from cosmos_core.control.ordinals import pack_ordinals, unpack_ordinals
from cosmos_core.control.staleness import policy_of
from cosmos_core.control.state import (
    UNKNOWN_VERSION,
    ControllerState,
    GroupState,
    ReplicaState,
    StepState,
    StepStats,
)
from cosmos_core.messages import Train


class Steps:
    """All changes to ``state.step`` and ``state.training`` go through here."""

    def __init__(
        self,
        state: ControllerState,
        config: ControllerConfig,
        groups: GroupTable,
        endurance: Endurance,
    ) -> None:
        """Go on with what is there."""
        self._stats: list[StepStats] = []
        self._state = state
        self._config = config
        self._groups = groups
        self._endurance = endurance
        self._policy = policy_of(config.staleness)

    # ---------------------------------------------------------------- looking

    @property
    def are_all_taken(self) -> bool:
        """Whether the run has none left to take."""
        return self._state.step >= self._config.num_steps

    @property
    def are_sampled_for(self) -> bool:
        """Whether any group is being sampled."""
        return self._groups.stages["generating"] > 0

    def may_dispatch(self, version: int) -> bool:
        """Tell whether a prompt may go to a replica that holds ``version`` or a newer one."""
        known = min(version, self._state.step)
        return self._policy.may_dispatch(self._groups.load(), self._groups.deadline(known))

    @property
    def policies_agree(self) -> bool:
        """Whether all policy replicas are there and hold the weights of the next step.

        Where they come and go, enough of them are: who is behind is helped by the others.
        """
        policies = self._state.policies()
        return len(policies) >= self._config.policies_needed and (
            self._config.min_policies > 0
            or all(policy.version == self._state.step for policy in policies)
        )

    @property
    def at_work(self) -> AtWork:
        """What is being done."""
        state, needed = self._state, self._config.policies_needed
        is_whole = len(state.policies()) >= needed and hold_step(state, self._config)
        is_training = state.training is not None and is_whole
        return AtWork(self._groups.stages["generating"], is_training)

    def versions_held(self) -> set[int]:
        """Return the versions of the policy replicas; of those that come and go, the newest.

        Weights of a lost lineage are none. Fixed replicas are waited for until none has such.

        One that was ordered a step since it joined may have got newer weights from another, which
        may be dead by now, and not have said so yet. While a run goes on, those that are no more
        than a step needs are believed: together they would wait for that one for ever.
        """
        everybody = self._state.policies()
        policies = [policy for policy in everybody if policy.version != UNKNOWN_VERSION]
        held = {policy.version for policy in policies}
        if not self._config.min_policies:
            return held if len(policies) == len(everybody) else set()
        may_be_few = len(policies) <= self._config.min_policies and not self._state.stopping
        if not may_be_few and any(policy.ordered for policy in policies):
            held.add(self._state.step)
        return {max(held)} if held else held

    def surely_has(self, version: int) -> bool:
        """Tell whether weights of that number are surely those that the policy had."""
        state = self._state
        return version <= state.step + 1 and not 0 <= state.lineage_from < version

    def orders_for(self, joined: ReplicaState) -> list[tuple[str, Train]]:
        """Return the step in hand, if there is one, for a policy replica that joined.

        Those that joined before there were enough had to wait for it: they have not got it either.
        """
        policies = self._state.policies()
        waited = len(policies) == self._config.policies_needed
        if self._state.training is None:
            return []
        told = [p for p in (policies if waited else [joined]) if p.version <= self._state.step]
        return self.orders(told)

    # ---------------------------------------------------------------- changing

    def form(self, now: float) -> Train | None:
        """Form the next step if its groups and its policy replicas are there."""
        state = self._state
        if state.training is not None or self.are_all_taken:
            return None
        chosen = self._policy.choose(self._groups.load(), self._groups.dispatched)
        if chosen is None or not self.policies_agree:
            return None
        if lost := [group for group in chosen if _newest(group) > state.step]:
            # nobody has weights of such a number yet: others had it that have died with a policy
            for group in lost:
                self._groups.reset(group)
            return None
        for group in chosen:
            self._groups.move(group, "training")
        every = self._config.checkpoint_every
        is_due = every > 0 and (state.step + 1) % every == 0
        ordinals = tuple(sorted(group.ordinal for group in chosen))
        state.training = StepState(
            step=state.step,
            since_s=now,
            ordinals=ordinals,
            cut=b"",
            validated_s=state.validated_s,
        )
        state.validated_s = 0.0
        if is_due:
            state.training.cut = cut_of(state)
        return self.order()

    def orders(self, policies: Sequence[ReplicaState]) -> list[tuple[str, Train]]:
        """Return the step in hand as an order to each of some policy replicas."""
        for policy in policies:
            policy.ordered = True
            self._endurance.note_ordered()
        return [(policy.name, self.order()) for policy in policies]

    def order(self) -> Train:
        """Return the command for the step in hand, always the same."""
        training = self._state.training
        assert training is not None
        return Train(
            step=training.step,
            groups=tuple(group.samples for group in self._training_groups(training)),
            publish=True,
            cut=training.cut,
            line=self._state.line,
            validated_s=training.validated_s,
        )

    def finish(self, policy: ReplicaState, step: int, now: float) -> None:
        """Note that a policy replica took the step; commit it with the last one."""
        training = self._state.training
        if training is not None and step == training.step:
            policy.version = max(policy.version, step + 1)
            if self._state.stop is None:  # then it is for `Ending` to say
                self.commit_if_done(now)
        elif not self._config.min_policies:
            self._state.counters.duplicates += 1
        else:
            policy.version = max(policy.version, step + 1)  # another member said so before
            if policy.version > self._state.step:
                self.skip_to(policy.version, now)

    def commit_if_done(self, now: float) -> None:
        """Commit the step in hand if all policy replicas, or members, hold its weights."""
        training, policies = self._state.training, self._state.policies()
        if training is None or len(policies) < self._config.policies_needed:
            return
        is_taken = any if self._config.min_policies else all
        if is_taken(policy.version == training.step + 1 for policy in policies):
            self._commit(training, now)

    def commit_if_kept(self, now: float) -> bool:
        """Commit the step in hand if somebody has its weights, however few are there.

        Whoever has them took it with all the others. Where policy replicas always are the same, who
        is at it may yet say that it has them too, and is waited for until it has done what it was
        told.

        Returns:
            Whether it was committed.
        """
        training = self._state.training
        known = [p for p in self._state.policies() if p.version != UNKNOWN_VERSION]
        if training is None or all(policy.version <= training.step for policy in known):
            return False
        open_ones = [p for p in known if p.version <= training.step and not p.stopped]
        if open_ones and not self._config.min_policies:
            return False
        self._commit(training, now)
        return True

    def _commit(self, training: StepState, now: float) -> None:
        state = self._state
        state.last_step = self._statistics(training, now)
        self._stats.append(state.last_step)
        for group in self._training_groups(training):
            self._groups.consume(group)
        state.consumed_since_save[training.step] = pack_ordinals(training.ordinals)
        self._set_step(training.step + 1, now)

    def take_stats(self) -> list[StepStats]:
        """Return the figures of steps committed since the last call."""
        stats, self._stats = self._stats, []
        return stats

    def rewind(self, version: int, now: float) -> None:
        """Fall back to a checkpoint: what was trained on since then is issued again.

        A new lineage of weights begins, and the numbers after ``version`` are given out anew.
        """
        state = self._state
        state.counters.steps_void += state.step - version + (state.training is not None)
        lost = [step for step in state.consumed_since_save if step >= version]
        for step in lost:
            for ordinal in unpack_ordinals(state.consumed_since_save.pop(step)):
                self._groups.reissue(ordinal)
        self.abandon()
        self.reset_after(version)
        self._set_step(version, now)
        state.line = (*state.line, version)

    def reset_after(self, version: int) -> None:
        """Have groups sampled again that are ready but come from weights that are lost."""
        for group in list(self._state.groups.values()):
            if group.stage == "ready" and _newest(group) > version:
                self._groups.reset(group)

    def skip_to(self, version: int, now: float) -> None:
        """Go on from weights that are ahead of our books."""
        self._state.counters.steps_skipped += version - self._state.step
        self.abandon()
        self._set_step(version, now)

    def drop_expired(self) -> None:
        """Drop ready groups that may no longer be trained on."""
        load = self._groups.load()
        if not any(self._policy.is_expired(load, deadline) for deadline in load.ready):
            return
        for group in self._groups.dispatched():
            deadline = self._groups.deadline(group.version)
            if group.stage == "ready" and self._policy.is_expired(load, deadline):
                self._groups.drop(group, "too stale")

    def saved(self, step: int) -> None:
        """Note that a checkpoint holds everything up to and including a step."""
        state = self._state
        state.saved = max(state.saved, step + 1)
        for known in [s for s in state.consumed_since_save if s <= step]:
            for ordinal in unpack_ordinals(state.consumed_since_save.pop(known)):
                state.attempts_used.pop(ordinal, None)

    def abandon(self) -> None:
        """Give the step in hand up; its groups are unfinished."""
        training = self._state.training
        if training is not None:
            for group in self._training_groups(training):
                self._groups.move(group, "ready")
        self._state.training = None

    def _set_step(self, step: int, now: float) -> None:
        self._state.training = None
        self._state.step = step
        self._state.idle_since_s = now

    def _training_groups(self, training: StepState) -> list[GroupState]:
        return [self._state.groups[ordinal] for ordinal in training.ordinals]

    def _statistics(self, training: StepState, now: float) -> StepStats:
        groups = self._training_groups(training)
        samples = [s for g in groups for s in g.samples if s.status == "completed"]
        staleness = [training.step - group.version for group in groups]
        counters = self._state.counters
        return StepStats(
            step=training.step,
            reward=sum(sample.reward for sample in samples) / len(samples),
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            waited_s=training.since_s - self._state.idle_since_s,
            validated_s=training.validated_s,
            trained_s=now - training.since_s,
            trained_length=sum(sample.num_tokens for sample in samples) / len(samples),
            generated_length=counters.generated_tokens / max(1, counters.generated_samples),
        )


def hold_step(state: ControllerState, config: ControllerConfig) -> bool:
    """Whether policy replicas have the weights that the next step, or that in hand, needs.

    Of those that come and go one that has them is enough, or one that is helped to them.
    """
    held = {policy.version for policy in state.policies()}
    if config.min_policies:
        return held != {UNKNOWN_VERSION}
    step = state.step
    return held == {step} if state.training is None else held <= {step, step + 1}


def _newest(group: GroupState) -> int:
    return max(s.newest_version for s in group.samples if s.status == "completed")
