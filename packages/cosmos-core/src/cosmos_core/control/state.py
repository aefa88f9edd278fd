"""Everything a controller knows, as plain data that is written down and read back whole."""

from typing import Literal

import msgspec

from cosmos_core.control.ordinals import Packed
from cosmos_core.messages import GroupId, Role, SampleRef

GroupStage = Literal["waiting", "generating", "ready", "training"]
TRAIN = "train"
UNKNOWN_VERSION = -1
FAILURES_ALLOWED = 3
"""After so many groups in a row that failed, a replica is given one at a time, with pauses."""


class GroupState(msgspec.Struct, kw_only=True):
    """An issued training prompt that is neither consumed nor dropped.

    ``version`` is a lower bound on the versions of its tokens: that of its replica when it was
    given out, that of its oldest token once it is ready; unknown while it waits. ``attempt`` names
    what was sampled and is never used twice; a prompt that is issued again begins at
    ``first_attempt``.
    """

    ordinal: int
    stage: GroupStage = "waiting"
    attempt: int = 0
    first_attempt: int = 0
    replica: str = ""
    version: int = UNKNOWN_VERSION
    since_s: float = 0.0
    samples: tuple[SampleRef, ...] = ()

    @property
    def group(self) -> GroupId:
        """Its identity in messages."""
        return GroupId(TRAIN, 0, self.ordinal)


class ReplicaState(msgspec.Struct, kw_only=True):
    """A replica that joined and is thought alive.

    ``seat`` numbers joins; ``worked`` says whether it has done anything since it joined; ``busy``
    counts groups given to it; ``loading`` is the version it was told to load, from the rollout
    replica ``loading_from`` if that is not empty; ``has_loaded`` says whether it has loaded any
    since it joined; ``published`` is what a policy replica serves, ``endpoints`` where it does, or
    where a rollout replica serves what it loads; ``skipped`` counts versions that it had and did
    not publish with their step, ``skipped_version`` is the last, and ``held_by`` says who read
    others then, until one as new is published; ``ordered`` says whether it was ordered a step
    since it joined. ``failures`` counts groups that failed since the last that came back;
    ``resting`` says that it is given nothing because of them until ``rest_until_s``, and
    ``last_failure`` names the last. ``failed_loads`` counts loads of weights that failed since the
    last that did not, and ``load_failure`` names the last. ``leaving`` says that it is given
    nothing more, ``dismissed`` that it was told to stop. ``first_group_s`` is how long after it
    joined its first training group came; -1 before. ``empty_since_s``: since when a rollout replica
    could have been given groups and holds none; -1 while it holds some, or has no weights.
    """

    name: str
    role: Role
    slots: int
    version: int
    endpoints: tuple[str, ...]
    incarnation: str
    seat: int
    seen_s: float
    host: str = ""
    joined_s: float = 0.0
    first_group_s: float = -1.0
    worked: bool = False
    busy: int = 0
    loading: int = UNKNOWN_VERSION
    loading_from: str = ""
    has_loaded: bool = False
    retry_at_s: float = 0.0
    published: int = UNKNOWN_VERSION
    skipped: int = 0
    skipped_version: int = UNKNOWN_VERSION
    held_by: str = ""
    ordered: bool = False
    stopped: bool = False
    failures: int = 0
    resting: bool = False
    rest_until_s: float = 0.0
    last_failure: str = ""
    failed_loads: int = 0
    load_failure: str = ""
    leaving: bool = False
    dismissed: bool = False
    empty_since_s: float = -1.0

    @property
    def free(self) -> int:
        """Groups it may be given: none while it rests or leaves, one to try it after a rest."""
        if self.resting or self.leaving:
            return 0
        if self.failures >= FAILURES_ALLOWED:
            return min(1, self.slots) - self.busy
        return self.slots - self.busy


class StepState(msgspec.Struct, kw_only=True):
    """The step that policy replicas are working on; it keeps its groups until it is committed.

    ``validated_s``: for how long validations held it up.
    """

    step: int
    since_s: float
    ordinals: tuple[int, ...]
    cut: bytes
    validated_s: float = 0.0


class RoundState(msgspec.Struct, kw_only=True):
    """One validation: held-out prompts answered by one version.

    ``chosen`` are those who answer and keep its version, with how many of its prompts each holds,
    ``chosen_slots`` their slots together.
    ``of_sets`` are the mean rewards of prompts that are from a named data set. Attempts begin at
    ``first_attempt``, so that no answer to an earlier round of a version with the same number
    passes for one of this; those in ``void`` are not a prompt's fault.
    """

    version: int
    since_s: float
    waiting: list[int]
    given: dict[int, str] = msgspec.field(default_factory=dict)
    chosen: dict[str, int] = msgspec.field(default_factory=dict)
    chosen_slots: int = 0
    first_attempt: int = 0
    attempts: dict[int, int] = msgspec.field(default_factory=dict)
    void: dict[int, int] = msgspec.field(default_factory=dict)
    rewards: list[float] = msgspec.field(default_factory=list)
    best: list[float] = msgspec.field(default_factory=list)
    failed: int = 0
    of_sets: dict[str, list[float]] = msgspec.field(default_factory=dict)

    def attempt_at(self, ordinal: int) -> int:
        """Return which attempt at a prompt is made now, or comes next."""
        return self.attempts.get(ordinal, self.first_attempt)


class ValidationResult(msgspec.Struct, kw_only=True, frozen=True):
    """What a validation found: prompts answered, their mean reward, prompts that failed.

    ``num_samples`` is how often each prompt was asked, ``best_reward`` the mean over prompts of the
    best of their answers (pass@k, where rewards are 0 or 1), ``of_sets`` the mean reward of each
    data set that prompts name.
    """

    version: int
    count: int
    mean_reward: float
    failed: int
    num_samples: int = 1
    best_reward: float = 0.0
    of_sets: dict[str, float] = msgspec.field(default_factory=dict)


class StepStats(msgspec.Struct, kw_only=True, frozen=True):
    """What was trained on in one committed step.

    ``waited_s`` is how long the policy waited for the step to be formed, ``validated_s`` how much
    of that a validation held it up, ``trained_s`` how long it took; lengths are mean trained tokens
    per sample of this step and of everything generated.
    """

    step: int
    reward: float
    staleness_mean: float
    staleness_max: int
    waited_s: float
    trained_s: float
    validated_s: float = 0.0
    trained_length: float
    generated_length: float


class Counters(msgspec.Struct, kw_only=True):
    """Sums that only grow; but consumed shrinks when a policy falls back to a checkpoint.

    ``reports_lost`` are words of weights that the run fell back from; ``failures`` says of what
    samples failed, by who is to blame and the class of the failure.
    """

    issued: int = 0
    consumed: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    retries: int = 0
    duplicates: int = 0
    replicas_joined: int = 0
    replicas_lost: int = 0
    loads: int = 0
    loads_from_rollouts: int = 0
    loads_failed: int = 0
    publications_skipped: int = 0
    reports_lost: int = 0
    steps_void: int = 0
    steps_skipped: int = 0
    samples_failed: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    generated_samples: int = 0
    generated_tokens: int = 0


class EnduranceState(msgspec.Struct, kw_only=True):
    """How long a run has got no further.

    ``has_reward`` says whether any sample was ever given its rewards, ``unrewarded`` how many were
    not by the fault of a reward. ``unrewarded_in_a_row``: the same since the last that was;
    ``row_since_s`` is the first tick since they began, -1 before, and ``is_row_of_all`` says that
    all that was in work then has come back. ``last_unrewarded_by`` and ``last_unrewarded`` are
    the reward, and what was said, of the last. ``failed`` counts attempts at groups in a row that
    came to nothing, ``failing_s`` the seconds since the first of them while nothing was trained;
    ``still_s`` are those in which nobody had anything to do and no more than ``most_there``
    replicas were there. ``ticked_s`` is when time was counted last; -1 before. ``lacking_s``: for
    how long the step in hand has had too few policy replicas, or such as disagree. ``deaths``
    counts attempts at ``deadly_step``, and steps before it, in which a policy replica died since a
    step after it was taken; ``is_tried`` says that another attempt is under way.
    ``gives_up_step``: the run ends, and waits for no step in hand.
    """

    has_reward: bool = False
    unrewarded: int = 0
    unrewarded_in_a_row: int = 0
    row_since_s: float = -1.0
    is_row_of_all: bool = False
    last_unrewarded_by: str = ""
    last_unrewarded: str = ""
    failed: int = 0
    failing_s: float = 0.0
    last_failure: str = ""
    still_s: float = 0.0
    most_there: int = 0
    ticked_s: float = -1.0
    lacking_s: float = 0.0
    deadly_step: int = UNKNOWN_VERSION
    deaths: int = 0
    is_tried: bool = False
    gives_up_step: bool = False


class ControllerState(msgspec.Struct, kw_only=True):
    """The fold of all events.

    ``consumed_since_save``: the prompts of each step that no checkpoint holds, packed: of all steps
    if there are no checkpoints. ``attempts_used``: the last attempt at those that were tried again.
    ``saved``: the newest version of which there is a checkpoint, older than which the run never
    falls back to. ``line``: the versions that policy replicas fell back to, in order
    (`cosmos_core.lineage`).
    ``next_round_attempt``: that which the next validation begins at.
    ``validated_s``: for how long validations held up the step that is formed next, less the time
    since ``held_up_s``, from when one does; -1 while none does.
    ``unusable_in_a_row``: prompts dropped by their own fault since samples were taken in last.
    ``equal_in_a_row``: groups dropped for rewards that are all equal since the last that was not.
    ``lineage_from``: versions after it may have existed twice; a number alone does not identify
    them. ``wanted_rollouts`` and
    ``wanted_policies``: how many replicas somebody asked for while the run went on; -1 if nobody
    did. ``silent``: replicas that have lost their lease and were not heard of since, and when they
    did. ``stop`` is the cut that a run ends with, ``stop_saved`` whether a checkpoint holds it.
    """

    step: int = 0
    next_ordinal: int = 0
    groups: dict[int, GroupState] = msgspec.field(default_factory=dict)
    replicas: dict[str, ReplicaState] = msgspec.field(default_factory=dict)
    silent: dict[str, float] = msgspec.field(default_factory=dict)
    policy_names: list[str] = msgspec.field(default_factory=list)
    training: StepState | None = None
    idle_since_s: float = 0.0
    consumed_since_save: dict[int, Packed] = msgspec.field(default_factory=dict)
    attempts_used: dict[int, int] = msgspec.field(default_factory=dict)
    round: RoundState | None = None
    rounds_done: list[ValidationResult] = msgspec.field(default_factory=list)
    next_round_attempt: int = 0
    validated_s: float = 0.0
    held_up_s: float = -1.0
    counters: Counters = msgspec.field(default_factory=Counters)
    last_step: StepStats | None = None
    saved: int = 0
    line: tuple[int, ...] = ()
    unusable_in_a_row: int = 0
    equal_in_a_row: int = 0
    endurance: EnduranceState = msgspec.field(default_factory=EnduranceState)
    lineage_from: int = UNKNOWN_VERSION
    wanted_rollouts: int = -1
    wanted_policies: int = -1
    stopping: str = ""
    stop: bytes | None = None
    stop_saved: bool = False
    finished: str = ""

    def policies(self) -> list[ReplicaState]:
        """Return the policy replicas."""
        return [self.replicas[name] for name in self.policy_names]

    def rollouts(self) -> list[ReplicaState]:
        """Return the rollout replicas."""
        return [r for r in self.replicas.values() if r.role == "rollout"]
