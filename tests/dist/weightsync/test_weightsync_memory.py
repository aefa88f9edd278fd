"""What a transfer takes beyond what is kept between versions: at most the bucket it was given."""

from collections.abc import Callable
from typing import Any

import pytest

from cosmos_weightsync.sender import standard_transports

MODEL_MIB = 96
BUCKET_MIB = 16
SLACK_MIB = 5
"""Frames, thread stacks, what libraries allocate on the way: far less than another bucket."""


BY_MESSAGES = [item.name for item in standard_transports() if not item.capabilities.one_sided]


Start = Callable[[str, dict[str, Any]], Any]


def members(
    start: Start, setup: dict[str, Any], num_senders: int, num_receivers: int
) -> tuple[list[Any], list[Any]]:
    """Senders of half of the rows each, or of all, and receivers that fetch from all of them."""
    setup = {"mib": MODEL_MIB, "bucket_bytes": BUCKET_MIB << 20, **setup}
    ranks = [{"rank": rank, "num_ranks": num_senders} for rank in range(num_senders)]
    senders = [start("memory_process.py", {**setup, **rank}) for rank in ranks]
    endpoints = [sender.answer()["endpoint"] for sender in senders]
    receivers = [
        start("memory_process.py", {**setup, "endpoints": endpoints}) for _ in range(num_receivers)
    ]
    for receiver in receivers:
        receiver.answer()
    return senders, receivers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "num_senders", "num_receivers"),
    [
        *[(item.name, 1, 1) for item in standard_transports()],
        *[(name, *ends) for name in ("tcp", "process_group") for ends in ((1, 4), (4, 1))],
    ],
)
def test_a_transfer_takes_no_more_memory_than_its_bucket(
    start: Start, transport: str, num_senders: int, num_receivers: int
) -> None:
    senders, receivers = members(start, {"transport": transport}, num_senders, num_receivers)
    grown = {"sender": 0.0, "receiver": 0.0}
    for version in range(1, 6):
        ask_all([*senders, *receivers], "forget_peak")
        ask_all(senders, "publish", version=version)
        ask_all(receivers, "stage", version=version)
        if version >= 4:  # Both snapshots and the staging memory exist, and were touched.
            note_growth(grown, senders, receivers)
    assert max(grown.values()) <= BUCKET_MIB + SLACK_MIB, grown
    for end in (*senders, *receivers):
        end.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "num_senders", "num_receivers"),
    [*[(name, 1, 1) for name in BY_MESSAGES], ("tcp", 1, 4), ("tcp", 4, 1)],
)
def test_changes_take_no_more_memory_than_the_bucket(
    start: Start, transport: str, num_senders: int, num_receivers: int
) -> None:
    setup = {"transport": transport, "reuse": "changes"}
    senders, receivers = members(start, setup, num_senders, num_receivers)
    grown = {"sender": 0.0, "receiver": 0.0}
    for version in range(1, 6):
        ask_all(senders, "change", version=version)
        ask_all(senders, "publish", version=version)
        if version == 2:  # From here on only transfers take memory, all of which is theirs.
            ask_all([*senders, *receivers], "forget_peak")
        staged = ask_all(receivers, "stage", version=version)
        if version >= 2:
            shares = [answer["wire_share"] for answer in staged]
            assert 0.1 < min(shares) <= max(shares) < 0.6, "lists of a quarter of the values"
            note_growth(grown, senders, receivers)
    assert max(grown.values()) <= BUCKET_MIB + SLACK_MIB, grown
    for end in (*senders, *receivers):
        end.end()


def note_growth(grown: dict[str, float], senders: list[Any], receivers: list[Any]) -> None:
    """Keep the most that any of a side has grown by, in MiB."""
    for side, ends in (("sender", senders), ("receiver", receivers)):
        found = [answer["mib"] for answer in ask_all(ends, "grown")]
        grown[side] = max(grown[side], *found)


def ask_all(ends: list[Any], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """All at the same time."""
    for end in ends:
        end.tell(do, **arguments)
    return [end.answer() for end in ends]
