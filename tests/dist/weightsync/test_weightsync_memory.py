"""What a transfer takes beyond what is kept between versions: at most the bucket it was given."""

from collections.abc import Callable
from typing import Any

import pytest

from cosmos_weightsync.sender import standard_transports

MODEL_MIB = 48
BUCKET_MIB = 4
SLACK_MIB = 5
"""Frames, thread stacks, what libraries allocate on the way: far below a tenth of the model."""


@pytest.mark.slow
@pytest.mark.parametrize("transport", [item.name for item in standard_transports()])
def test_a_transfer_takes_no_more_memory_than_its_bucket(
    start: Callable[[str, dict[str, Any]], Any], transport: str
) -> None:
    setup = {"mib": MODEL_MIB, "bucket_bytes": BUCKET_MIB << 20, "transport": transport}
    sender = start("memory_process.py", setup)
    endpoint = sender.answer()["endpoint"]
    receiver = start("memory_process.py", {**setup, "endpoint": endpoint})
    receiver.answer()
    grown = {"sender": 0.0, "receiver": 0.0}
    for version in range(1, 6):
        sender.ask("forget_peak")
        receiver.ask("forget_peak")
        sender.ask("publish", version=version)
        receiver.ask("stage", version=version)
        if version >= 4:  # Both snapshots and the staging memory exist, and were touched.
            grown["sender"] = max(grown["sender"], sender.ask("grown")["mib"])
            grown["receiver"] = max(grown["receiver"], receiver.ask("grown")["mib"])
    assert max(grown.values()) <= BUCKET_MIB + SLACK_MIB, grown
    sender.end()
    receiver.end()
