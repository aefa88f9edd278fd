"""What the payloads of samples are called, and which of them nobody waits for any more."""

import re

from cosmos_core.control.state import TRAIN, ControllerState
from cosmos_core.messages import GroupId

_KEY = re.compile(r"(?P<source>\w+)\.(?P<round>\d+)\.(?P<ordinal>\d+)\.(?P<attempt>\d+)\.\d+")


def payload_key(group: GroupId | str, attempt: int, sibling: int) -> str:
    """Return the key of a sample's payload, which no other attempt uses."""
    return f"{group}.{attempt}.{sibling}"


def is_over(state: ControllerState, key: str) -> bool:
    """Whether a payload is of an attempt that is neither waited for nor kept.

    Whoever made it was taken for dead, or died, before the controller heard of it. Attempts are
    never used twice, so that what is over once is over for good.

    Args:
        state: of the controller that orders attempts now.
        key: as `payload_key` makes it; any other is not over.
    """
    found = _KEY.fullmatch(key)
    if found is None:
        return False
    ordinal, attempt = int(found["ordinal"]), int(found["attempt"])
    if found["source"] == TRAIN:
        group = state.groups.get(ordinal)
        return ordinal < state.next_ordinal if group is None else attempt < group.attempt
    opened = state.round
    if opened is None or opened.version != int(found["round"]):
        return True
    return attempt < opened.attempt_at(ordinal)
