"""Validation rounds: held-out prompts, each round answered by exactly one weight version.

While a round is open, the replicas that hold its version are not told to load another one.
"""

from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.state import (
    ControllerState,
    ReplicaState,
    RoundState,
    ValidationResult,
)
from cosmos_core.messages import Command, Generate, GroupFinished, GroupId

SOURCE = "validation"


def is_due(state: ControllerState, config: ControllerConfig) -> bool:
    """Tell whether the version now published is one to validate and has not been."""
    plan = config.validation
    if not plan.num_prompts or state.round is not None or state.published < 0:
        return False
    done = [result.version for result in state.rounds_done]
    if not done and plan.before and state.step < config.num_steps:
        return True
    if state.step >= config.num_steps:
        return plan.after and state.step not in done and state.published >= state.step
    last = max(done, default=0)
    return bool(plan.every) and state.step // plan.every > last // plan.every


def is_final_missing(state: ControllerState, config: ControllerConfig) -> bool:
    """Tell whether the run may not end yet because its last version is to be validated."""
    plan = config.validation
    if not plan.num_prompts or not plan.after:
        return False
    return all(result.version != config.num_steps for result in state.rounds_done)


def blocks_training(state: ControllerState, config: ControllerConfig) -> bool:
    """Tell whether training prompts wait for the first validation."""
    plan = config.validation
    return bool(plan.num_prompts and plan.before and not state.rounds_done)


def open_round(state: ControllerState, config: ControllerConfig) -> None:
    """Open a round for the newest version that a replica holds, if there is such a replica."""
    versions = [r.version for r in _holders(state) if not r.stopped and r.loading < 0]
    newest = max(versions, default=-1)
    final = state.step >= config.num_steps
    if newest < 0 or (final and newest < state.step):
        return
    if any(result.version == newest for result in state.rounds_done):
        return
    state.round = RoundState(version=newest, waiting=list(range(config.validation.num_prompts)))


def pins(state: ControllerState, replica: ReplicaState) -> bool:
    """Tell whether a replica must keep its version until the open round is over."""
    return state.round is not None and replica.version == state.round.version


def give_out(state: ControllerState, free: dict[str, int]) -> list[tuple[str, Command]]:
    """Give prompts of the open round to replicas that hold its version; uses up ``free`` slots."""
    commands: list[tuple[str, Command]] = []
    opened = state.round
    if opened is None:
        return commands
    names = [r.name for r in _holders(state) if r.version == opened.version and r.loading < 0]
    if not names:
        # The last holder of the version is gone: the round starts again with another version.
        state.round = None
        return commands
    while opened.waiting and (name := max(names, key=lambda n: free.get(n, 0))):
        if free.get(name, 0) <= 0:
            break
        ordinal = opened.waiting.pop(0)
        opened.given[ordinal] = name
        free[name] -= 1
        commands.append(
            (
                name,
                Generate(
                    group=GroupId(SOURCE, opened.version, ordinal),
                    attempt=opened.attempts.get(ordinal, 0),
                    num_samples=1,
                    greedy=True,
                ),
            )
        )
    return commands


def record(state: ControllerState, event: GroupFinished) -> bool:
    """Take an answer in; return whether it was waited for."""
    opened = state.round
    ordinal = event.group.ordinal
    if opened is None or event.group.round != opened.version or ordinal not in opened.given:
        return False
    del opened.given[ordinal]
    completed = [sample for sample in event.samples if sample.status == "completed"]
    if completed:
        opened.rewards.extend(sample.reward for sample in completed)
    else:
        opened.failed += 1
    return True


def give_back(state: ControllerState, replica: str, ordinals: list[int] | None = None) -> None:
    """Put prompts that a replica will not answer back into the round."""
    opened = state.round
    if opened is None:
        return
    lost = [o for o, name in opened.given.items() if name == replica]
    for ordinal in lost if ordinals is None else ordinals:
        if opened.given.pop(ordinal, None) is not None:
            opened.attempts[ordinal] = opened.attempts.get(ordinal, 0) + 1
            opened.waiting.append(ordinal)


def close_if_done(state: ControllerState) -> None:
    """Close the open round when every prompt is answered."""
    opened = state.round
    if opened is None or opened.waiting or opened.given:
        return
    count = len(opened.rewards)
    state.rounds_done.append(
        ValidationResult(
            version=opened.version,
            count=count,
            mean_reward=sum(opened.rewards) / count if count else 0.0,
            failed=opened.failed,
        )
    )
    state.round = None


def _holders(state: ControllerState) -> list[ReplicaState]:
    return [r for r in state.replicas.values() if r.role == "rollout"]
