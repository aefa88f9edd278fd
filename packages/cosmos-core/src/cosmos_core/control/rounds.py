"""Validation rounds: held-out prompts, each round answered by exactly one weight version.

Who answers (`cosmos_core.control.answerers`) is not told to load another one. If the last that
holds the version is gone, the round starts again with the version that others hold.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from cosmos_core.control.answerers import Answerers, choose, choose_all, holds
from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.endurance import Endurance
from cosmos_core.control.replicas import ReplicaTable, failure_of
from cosmos_core.control.state import (
    ControllerState,
    ReplicaState,
    RoundState,
    ValidationResult,
)
from cosmos_core.messages import (
    CancelGroup,
    Generate,
    GroupFailed,
    GroupFinished,
    GroupId,
    SampleRef,
)

SOURCE = "validation"


class Rounds:
    """All changes to ``state.round`` and ``state.rounds_done`` go through here."""

    def __init__(
        self,
        state: ControllerState,
        config: ControllerConfig,
        replicas: ReplicaTable,
        endurance: Endurance,
    ) -> None:
        """Go on with what is there."""
        self._endurance = endurance
        self._state = state
        self._plan = config.validation
        self._num_steps = config.num_steps
        self._max_attempts = config.max_attempts
        self._replicas = replicas
        self._untold: list[ValidationResult] = []
        self._has_let_go = False
        if (opened := state.round) is not None and not opened.chosen:  # of a release before this
            opened.chosen = dict(Counter(opened.given.values()))
            opened.chosen_slots = self._slots_of(opened.chosen)

    # ---------------------------------------------------------------- looking

    @property
    def blocks_training(self) -> bool:
        """Whether training prompts wait for the first validation."""
        return bool(self._plan.num_prompts and self._plan.before and not self._state.rounds_done)

    @property
    def final_is_missing(self) -> bool:
        """Whether the run may not end yet because its last version is to be validated."""
        if not self._plan.num_prompts or not self._plan.after:
            return False
        return not self._is_done(self._last_version)

    def pins(self) -> Callable[[ReplicaState], bool]:
        """Return what tells of a replica whether it must keep its version for the open round."""
        chosen = {} if self._state.round is None else self._state.round.chosen
        return lambda replica: replica.name in chosen

    def kept_slots(self, may_train: Callable[[int], bool]) -> int:
        """Return the slots of who keeps a version for the round that training may not have."""
        opened = self._state.round
        if opened is None or may_train(opened.version):
            return 0
        return opened.chosen_slots

    # ---------------------------------------------------------------- changing

    def open_if_due(self, now: float) -> None:
        """Open a round for the newest version that a replica holds, if one is due."""
        if not self._plan.num_prompts or self._state.round is not None:
            return
        if not self._is_due(self._state.step):
            return  # nor is any before it; with each event nobody is looked at
        versions = [r.version for r in self._state.rollouts() if r.loading < 0]
        newest = max(versions, default=-1)
        if newest >= 0 and self._is_due(newest):
            waiting = list(range(self._plan.num_prompts))
            first = self._state.next_round_attempt
            self._state.round = RoundState(
                version=newest, since_s=now, waiting=waiting, first_attempt=first
            )

    def give_out(self, may_train: Callable[[int], bool]) -> list[tuple[str, Generate]]:
        """Give prompts of the open round to replicas that hold its version.

        Args:
            may_train: whether a prompt of training may be given to who holds a version.
        """
        opened = self._state.round
        if opened is None or not opened.waiting:
            return []
        answerers = self._choose(opened)
        if not opened.chosen:
            self._end(opened)
            return []
        room: list[tuple[int, str]] = []
        for name, count in opened.chosen.items():
            replica = self._state.replicas[name]
            free = min(replica.free, answerers.places(replica, may_train) - count)
            if free > 0 and holds(replica, opened.version):
                room.append((-free, name))
        heapq.heapify(room)
        orders: list[tuple[str, Generate]] = []
        while room and opened.waiting:
            free, name = heapq.heappop(room)
            orders.append((name, self._give(opened, name)))
            if free < -1:
                heapq.heappush(room, (free + 1, name))
        if not opened.waiting and (idle := [n for n, count in opened.chosen.items() if not count]):
            self._let_go(opened, idle)
            self._has_let_go = True
        return orders

    def _choose(self, opened: RoundState) -> Answerers:
        trains = not self.blocks_training and self._state.step < self._num_steps
        answerers = (choose if trains else choose_all)(opened, self._state.rollouts())
        if answerers.chosen.keys() != opened.chosen.keys():
            self._has_let_go |= not opened.chosen.keys() <= answerers.chosen.keys()
            opened.chosen = answerers.chosen
            opened.chosen_slots = self._slots_of(opened.chosen)
        return answerers

    def _let_go(self, opened: RoundState, names: Sequence[str]) -> None:
        """Have replicas answer no more of the round."""
        for name in names:
            del opened.chosen[name]
        opened.chosen_slots -= self._slots_of(names)

    def _slots_of(self, names: Iterable[str]) -> int:
        return sum(self._state.replicas[name].slots for name in names)

    def take_let_go(self) -> bool:
        """Tell whether since the last call others than who answered have been let go."""
        has, self._has_let_go = self._has_let_go, False
        return has

    def _give(self, opened: RoundState, name: str) -> Generate:
        ordinal = opened.waiting.pop(0)
        opened.given[ordinal] = name
        opened.chosen[name] += 1
        self._replicas.occupy(self._state.replicas[name], 1)
        return Generate(
            group=GroupId(SOURCE, opened.version, ordinal),
            attempt=opened.attempt_at(ordinal),
            num_samples=self._plan.num_samples,
        )

    def take_in(self, event: GroupFinished | GroupFailed) -> None:
        """Take an answer in, and close the round with the last one."""
        opened, ordinal = self._state.round, event.group.ordinal
        if (
            opened is None
            or event.group.round != opened.version
            or opened.given.get(ordinal) != event.replica
            or opened.attempt_at(ordinal) != event.attempt
        ):
            self._state.counters.duplicates += 1
            return
        self._take_from(opened, ordinal)
        samples = event.samples if isinstance(event, GroupFinished) else ()
        if not all(_is_of(opened.version, sample) for sample in samples):
            samples = ()  # it loaded other weights meanwhile
        self._endurance.note_samples(samples)
        answers = [sample for sample in samples if sample.status == "completed"]
        if answers:
            _note(opened, answers)
            self._endurance.note_sampled()
        elif isinstance(event, GroupFailed) and event.drop_as:
            opened.failed += 1
        else:
            if reason := failure_of(event):  # or it loaded other weights meanwhile
                self._endurance.note_failed(reason)
            self._retry(opened, ordinal)
        if not opened.waiting and not opened.chosen[event.replica]:
            self._let_go(opened, [event.replica])
        self._close_if_done(opened)

    def give_back(self, replica: ReplicaState) -> None:
        """Put the prompts that a lost replica will not answer back into the round."""
        opened = self._state.round
        if opened is None or opened.chosen.pop(replica.name, None) is None:
            return
        opened.chosen_slots -= replica.slots
        for ordinal in [o for o, name in opened.given.items() if name == replica.name]:
            del opened.given[ordinal]
            self._retry(opened, ordinal)
        self._close_if_done(opened)

    def take_results(self) -> list[ValidationResult]:
        """Return what validations found that ended since the last call."""
        results, self._untold = self._untold, []
        return results

    def forget_after(self, version: int) -> list[tuple[str, CancelGroup]]:
        """Forget what was measured of versions that are lost; return what is to be cancelled."""
        state = self._state
        state.rounds_done = [r for r in state.rounds_done if r.version <= version]
        opened = state.round
        if opened is None or opened.version <= version:
            return []
        self._end(opened)
        return self._cancel(opened, list(opened.given))

    def take_back(self, replica: str) -> list[tuple[str, CancelGroup]]:
        """Have all that a replica answers asked again: its weights are lost, or unknown.

        Returns:
            What is to be cancelled.
        """
        opened = self._state.round
        if opened is None:
            return []
        ordinals = [ordinal for ordinal, name in opened.given.items() if name == replica]
        cancelled = self._cancel(opened, ordinals)
        for ordinal in ordinals:
            opened.void[ordinal] = opened.void.get(ordinal, 0) + 1
            self._retry(opened, ordinal)
        if replica in opened.chosen:
            self._let_go(opened, [replica])
        return cancelled

    def _cancel(self, opened: RoundState, ordinals: list[int]) -> list[tuple[str, CancelGroup]]:
        cancelled: list[tuple[str, CancelGroup]] = []
        for ordinal in ordinals:
            name = self._take_from(opened, ordinal)
            group = GroupId(SOURCE, opened.version, ordinal)
            cancel = CancelGroup(group=group, attempt=opened.attempt_at(ordinal))
            cancelled.append((name, cancel))
        return cancelled

    def _take_from(self, opened: RoundState, ordinal: int) -> str:
        """Note that a replica answers a prompt no longer; return its name."""
        name = opened.given.pop(ordinal)
        opened.chosen[name] -= 1
        self._replicas.occupy(self._state.replicas[name], -1)
        return name

    def _end(self, opened: RoundState) -> None:
        last = max(opened.attempts.values(), default=opened.first_attempt)
        self._state.next_round_attempt = last + 1
        self._state.round = None

    def _is_due(self, version: int) -> bool:
        """Whether a version is to be measured: the rollouts may be behind the step."""
        plan, state = self._plan, self._state
        if self._is_done(version):
            return False
        if state.step >= self._num_steps:
            return self.final_is_missing and version >= self._last_version
        if not state.rounds_done and plan.before:
            return True
        last = max((result.version for result in state.rounds_done), default=0)
        return bool(plan.every) and version // plan.every > last // plan.every

    @property
    def _last_version(self) -> int:
        """The last version of the run: it may go on from one that is beyond its steps."""
        return max(self._num_steps, self._state.step)

    def _is_done(self, version: int) -> bool:
        return any(result.version == version for result in self._state.rounds_done)

    def _retry(self, opened: RoundState, ordinal: int) -> None:
        attempt = opened.attempts[ordinal] = opened.attempt_at(ordinal) + 1
        num_void = opened.void.get(ordinal, 0)
        if attempt - opened.first_attempt - num_void >= self._max_attempts:
            opened.failed += 1
        else:
            opened.waiting.append(ordinal)

    def _close_if_done(self, opened: RoundState) -> None:
        if opened.waiting or opened.given:
            return
        count = len(opened.rewards)
        result = ValidationResult(
            version=opened.version,
            count=count,
            mean_reward=sum(opened.rewards) / count if count else 0.0,
            failed=opened.failed,
            num_samples=self._plan.num_samples,
            best_reward=sum(opened.best) / count if count else 0.0,
            of_sets={name: sum(of) / len(of) for name, of in sorted(opened.of_sets.items())},
        )
        self._state.rounds_done.append(result)
        self._untold.append(result)
        self._end(opened)


def _note(opened: RoundState, answers: Sequence[SampleRef]) -> None:
    """Note the rewards of all answers to a prompt."""
    rewards = [answer.reward for answer in answers]
    mean = sum(rewards) / len(rewards)
    opened.rewards.append(mean)
    opened.best.append(max(rewards))
    if answers[0].data_set:
        opened.of_sets.setdefault(answers[0].data_set, []).append(mean)


def figures_of(result: ValidationResult) -> dict[str, float]:
    """Return a validation's figures by name, as sinks and figures of a run have them."""
    figures = {
        "reward": result.mean_reward,
        "num_prompts": float(result.count),
        "num_failed": float(result.failed),
    }
    if result.num_samples > 1:
        figures["best_reward"] = result.best_reward
    return figures | {f"data_set/{name}": reward for name, reward in result.of_sets.items()}


def _is_of(version: int, sample: SampleRef) -> bool:
    """Tell whether all tokens of a sample are of a version; one that failed is of any."""
    if sample.status != "completed" or not sample.num_tokens:
        return True
    return sample.oldest_version == sample.newest_version == version
