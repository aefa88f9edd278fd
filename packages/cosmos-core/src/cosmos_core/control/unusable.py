"""Prompts that nobody can sample: a run that is given nothing else ends, and says why.

One such prompt is dropped, counted, and replaced by the next. Where the data, the tokenizer and the
engine do not fit one another that would go on for ever.
"""

from cosmos_core.control.state import ControllerState
from cosmos_core.messages import GroupFailed

UNUSABLE = "no prompt can be sampled"
_FEWEST = 100
_FOR_EACH_IN_WORK = 20


def note_usable(state: ControllerState) -> None:
    """Note that samples of a prompt were taken in."""
    state.unusable_in_a_row = 0


def note_unusable(state: ControllerState, event: GroupFailed, num_generating: int) -> None:
    """Note a prompt that was dropped by its own fault; stop the run if it was one of too many.

    Those that can be sampled take longer: of data of which a share s is unusable,
    ``s / (1 - s)`` prompts are dropped for each that is in work before the first of these is done.
    So a run goes on with any data of which a tenth is usable.

    Args:
        state: of the run.
        event: says what is wrong with the prompt.
        num_generating: groups that are still in work.
    """
    state.unusable_in_a_row += 1
    if state.unusable_in_a_row >= max(_FEWEST, _FOR_EACH_IN_WORK * num_generating):
        state.stopping = state.stopping or (
            f"{UNUSABLE}: {state.unusable_in_a_row} in a row were dropped, the last as "
            f"'{event.drop_as}' ({event.reason})"
        )
