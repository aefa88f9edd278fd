"""The cut: what a checkpoint must hold of the controller, so that the sample stream goes on."""

from collections.abc import Sequence

import msgspec

from cosmos_core.control.state import (
    UNKNOWN_VERSION,
    ControllerState,
    GroupState,
    ValidationResult,
)


class Cut(msgspec.Struct, kw_only=True, frozen=True):
    """The sample stream at a step boundary.

    ``unfinished`` are the ordinals below ``next_ordinal`` that were neither trained on nor dropped.
    """

    step: int
    next_ordinal: int
    unfinished: tuple[int, ...]
    dropped: dict[str, int]
    rounds_done: tuple[ValidationResult, ...] = ()
    line: tuple[int, ...] = ()


def cut_of(state: ControllerState) -> bytes:
    """Return the sample stream at the end of the step in hand, or now if there is none."""
    training = state.training
    return _cut(state, state.step + 1, training.ordinals) if training else cut_before(state)


def cut_before(state: ControllerState) -> bytes:
    """Return the sample stream at the beginning of the step in hand, or now if there is none."""
    return _cut(state, state.step, ())


def _cut(state: ControllerState, step: int, done: Sequence[int]) -> bytes:
    cut = Cut(
        step=step,
        next_ordinal=state.next_ordinal,
        unfinished=tuple(sorted(state.groups.keys() - set(done))),
        dropped=dict(state.counters.dropped),
        rounds_done=tuple(state.rounds_done),
        line=state.line,
    )
    return msgspec.msgpack.encode(cut)


def step_of_cut(data: bytes) -> int:
    """Return the version of the weights that a cut belongs to.

    Raises:
        msgspec.ValidationError: if ``data`` is not what `cut_of` returned.
    """
    return msgspec.msgpack.decode(data, type=Cut).step


def line_of_cut(data: bytes) -> tuple[int, ...]:
    """Return the line that the weights of a cut end: they are of its last lineage.

    Raises:
        msgspec.ValidationError: if ``data`` is not what `cut_of` returned.
    """
    return msgspec.msgpack.decode(data, type=Cut).line


def state_from_cut(data: bytes) -> ControllerState:
    """Return the state of a controller that goes on from a cut; unfinished prompts wait first.

    Raises:
        msgspec.ValidationError: if ``data`` is not what `cut_of` returned.
    """
    cut = msgspec.msgpack.decode(data, type=Cut)
    state = ControllerState(step=cut.step, next_ordinal=cut.next_ordinal)
    state.groups = {ordinal: GroupState(ordinal=ordinal) for ordinal in cut.unfinished}
    state.counters.issued = cut.next_ordinal
    state.counters.dropped = dict(cut.dropped)
    num_open = len(cut.unfinished) + sum(cut.dropped.values())
    state.counters.consumed = cut.next_ordinal - num_open
    state.rounds_done = list(cut.rounds_done)
    state.saved = cut.step
    state.line = cut.line
    state.lineage_from = min(cut.line, default=UNKNOWN_VERSION)
    return state
