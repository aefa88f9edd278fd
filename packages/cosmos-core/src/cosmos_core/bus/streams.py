"""Reading answers of Redis streams, whichever protocol version they came by."""

from typing import Any

Entry = tuple[bytes, dict[bytes, bytes]]


def stream_entries(answer: Any) -> list[Entry]:
    """Return the entries of the only stream in an answer to XREAD or XREADGROUP."""
    if not answer:
        return []
    if isinstance(answer, dict):  # RESP3
        return [entry for batch in next(iter(answer.values())) for entry in batch]
    return answer[0][1]


def entry_number(entry: bytes) -> tuple[int, int]:
    """Return the id of an entry as numbers, which compare as the stream orders them."""
    milliseconds, number = entry.split(b"-")
    return int(milliseconds), int(number)
