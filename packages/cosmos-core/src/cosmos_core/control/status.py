"""What a person wants to know of a run: its figures, and in one line who is waited for."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from cosmos_core.control.books import Books
from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.state import (
    FAILURES_ALLOWED,
    UNKNOWN_VERSION,
    ControllerState,
    ReplicaState,
)
from cosmos_core.control.steps import hold_step

_MOST_REPLICAS = 100
_MOST_NAMED = 3
_FEWEST_EQUAL = 20


def status_of(
    state: ControllerState, config: ControllerConfig, books: Books, now: float
) -> dict[str, Any]:
    """Return the figures; of very many replicas only the first are listed."""
    return {
        "step": state.step,
        "num_steps": config.num_steps,
        "published": max((policy.published for policy in state.policies()), default=-1),
        "line": state.line,
        "stopping": state.stopping,
        "wanted_rollouts": state.wanted_rollouts,
        "wanted_policies": state.wanted_policies,
        "finished": state.finished,
        "waiting_for": waiting_for(state, config, now),
        "books": {
            **asdict(books),
            "dropped": dict(books.dropped),
            "in_flight": dict(books.in_flight),
        },
        "counters": msgspec.to_builtins(state.counters),
        "training": _training(state, now),
        "validating": _validating(state),
        "last_step": msgspec.to_builtins(state.last_step),
        "validations": {str(r.version): msgspec.to_builtins(r) for r in state.rounds_done},
        "num_replicas": len(state.replicas),
        "silent": {name: now - since_s for name, since_s in state.silent.items()},
        "replicas": {
            replica.name: {
                "role": replica.role,
                "version": replica.version,
                "loading": replica.loading,
                "busy": replica.busy,
                "slots": replica.slots,
                "leaving": replica.leaving,
                "failures": replica.failures,
                "last_failure": replica.last_failure,
                "failed_loads": replica.failed_loads,
                "load_failure": replica.load_failure,
                "skipped": replica.skipped,
                "held_by": replica.held_by,
                "silent_s": now - replica.seen_s,
                "first_group_s": replica.first_group_s if replica.first_group_s >= 0 else None,
            }
            for replica in list(state.replicas.values())[:_MOST_REPLICAS]
        },
    }


def _training(state: ControllerState, now: float) -> dict[str, float] | None:
    """Return the step in hand and for how long it has been; none while none is."""
    if state.training is None:
        return None
    return {"step": state.training.step, "for_s": now - state.training.since_s}


def _validating(state: ControllerState) -> dict[str, int] | None:
    """Return of which version answers are yet to come, and how many; none without a validation."""
    opened = state.round
    if opened is None:
        return None
    return {"version": opened.version, "left": len(opened.waiting) + len(opened.given)}


def waiting_for(state: ControllerState, config: ControllerConfig, now: float) -> str:
    """Say in one line what the run waits for, by name."""
    looks = (_end, _policies, _step, _rollouts, _failing, _validation, _signal, _group, _weights)
    for look in looks:
        if found := look(state, config, now):
            return found
    return "events"


Look = Callable[[ControllerState, ControllerConfig, float], str]


def _end(state: ControllerState, config: ControllerConfig, now: float) -> str:
    del config, now
    if state.finished:
        return f"nothing: {state.finished}"
    if state.stop is not None:
        slow = [policy.name for policy in state.policies() if not policy.stopped]
        return f"the last checkpoint of {', '.join(slow)}"
    return ""


def _policies(state: ControllerState, config: ControllerConfig, now: float) -> str:
    policies = state.policies()
    missing = config.policies_needed - len(policies)
    if missing > 0:
        said = f"{missing} of {config.policies_needed} policy replicas to join"
        there = f" beside {', '.join(policy.name for policy in policies)}" if policies else ""
        return f"{said}{there}{_silent(state, now)}"
    if not hold_step(state, config):
        found = ", ".join(f"{policy.name} at {_version_of(policy)}" for policy in policies)
        return f"policy replicas to agree on version {state.step}: {found}"
    return ""


def _version_of(policy: ReplicaState) -> str:
    is_lost = policy.version == UNKNOWN_VERSION
    return "weights that the run fell back from" if is_lost else f"version {policy.version}"


def _step(state: ControllerState, config: ControllerConfig, now: float) -> str:
    del config
    training = state.training
    if training is None:
        return ""
    slow = [policy.name for policy in state.policies() if policy.version <= training.step]
    return f"step {training.step + 1} on {', '.join(slow)} for {now - training.since_s:.1f} s"


def _rollouts(state: ControllerState, config: ControllerConfig, now: float) -> str:
    del config
    if state.wanted_rollouts == 0:
        return "somebody to want a rollout replica again, by 'cosmos-app scale'"
    if any(not replica.dismissed for replica in state.rollouts()):
        return ""
    return f"a rollout replica to join{_silent(state, now)}"


def _silent(state: ControllerState, now: float) -> str:
    """Name who may hang."""
    names = sorted(state.silent)[:_MOST_NAMED]
    return "".join(
        f"; {name} lost its lease {now - state.silent[name]:.1f} s ago, without progress"
        for name in names
    )


def _failing(state: ControllerState, config: ControllerConfig, now: float) -> str:
    del config
    rollouts = [replica for replica in state.rollouts() if not replica.leaving]
    if not rollouts or any(replica.failures < FAILURES_ALLOWED for replica in rollouts):
        return ""
    worst = min(rollouts, key=lambda replica: (replica.rest_until_s, replica.name))
    pause_s = max(0.0, worst.rest_until_s - now)
    return (
        f"rollout replicas that do not fail: {worst.name}, tried again in {pause_s:.1f} s, "
        f"said {worst.last_failure}"
    )


def _validation(state: ControllerState, config: ControllerConfig, now: float) -> str:
    opened = state.round
    if opened is None:
        return ""
    left = len(opened.waiting) + len(opened.given)
    where = ", ".join(sorted(set(opened.given.values()))[:_MOST_NAMED])
    said = (
        f"{left} validation answers of version {opened.version} on {where or 'no replica yet'} "
        f"for {now - opened.since_s:.1f} s"
    )
    group = "" if where else _group(state, config, now)
    return f"{said}; before them {group}" if group else said


def _signal(state: ControllerState, config: ControllerConfig, now: float) -> str:
    """Say of a run that samples and never trains why; it is for somebody else to end it."""
    del now
    if state.equal_in_a_row < max(_FEWEST_EQUAL, config.groups_per_step):
        return ""
    return (
        f"a group whose rewards differ: those of the last {state.equal_in_a_row} in a row were all "
        "equal, and trainer.drop_zero_signal drops such groups"
    )


def _group(state: ControllerState, config: ControllerConfig, now: float) -> str:
    del config
    generating = [group for group in state.groups.values() if group.stage == "generating"]
    if not generating:
        return ""
    oldest = min(generating, key=lambda group: (group.version, group.since_s, group.ordinal))
    since_s = now - oldest.since_s
    more = f" and {len(generating) - 1} more" if len(generating) > 1 else ""
    return f"group {oldest.group} on {oldest.replica} for {since_s:.1f} s{more}"


def _weights(state: ControllerState, config: ControllerConfig, now: float) -> str:
    del config, now
    published = max(policy.published for policy in state.policies())
    behind = [replica.name for replica in state.rollouts() if replica.version < published]
    if not behind and published < state.step:
        policies = state.policies()
        late = [policy for policy in policies if policy.version >= state.step] or policies
        names = ", ".join(policy.name for policy in late)
        return f"version {state.step} to be published by {names}{_held(late)}"
    if not behind:
        return ""
    if not any(policy.endpoints for policy in state.policies() if policy.published == published):
        return (
            f"endpoints of version {published}: the policy replicas that have it joined with none"
        )
    said = "".join(
        f"; {replica.name} could not, {replica.failed_loads} times: {replica.load_failure}"
        for replica in state.rollouts()
        if replica.name in behind and replica.failed_loads >= FAILURES_ALLOWED
    )
    said += _held(state.policies())
    return f"version {published} to load on {', '.join(behind)}{said}"


def _held(policies: Sequence[ReplicaState]) -> str:
    """Say which policies have newer weights that they do not serve, and who is in the way."""
    return "".join(
        f"; {policy.name} has no room to serve version {policy.skipped_version}: {policy.held_by}"
        for policy in policies
        if policy.held_by
    )
