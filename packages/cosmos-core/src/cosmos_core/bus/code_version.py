"""Which code a process speaks: told with all that it reports, so that two that differ part at once.

A release may change without its messages and messages, in a checkout, without the release, so both
are compared: ``0.1.0/3f9c2a1b`` is the release of cosmos-core and a digest of what messages hold.
"""

import functools
import hashlib
import importlib.metadata
from typing import Any

import msgspec

from cosmos_core.messages import Command, Event

_DIGEST_CHARACTERS = 8
_PROSE = ("description", "title")


@functools.cache
def code_version() -> str:
    """Return the release of this process's cosmos-core and a digest of its messages."""
    return f"{importlib.metadata.version('cosmos-core')}/{_digest(Event | Command)}"


def difference(replica: str, theirs: str, ours: str) -> str:
    """Say why a replica cannot be talked to, and what to do about it."""
    return (
        f"{replica} speaks {theirs or 'an older version'}, the controller of this run {ours} "
        "(release/messages): install the same release of cosmos-core on every machine of the "
        "run and start this replica again; the run goes on without it, nothing is lost"
    )


def other_log(run: str, theirs: str, ours: str) -> str:
    """Say why the log of a run cannot be read, and what to do about it."""
    return (
        f"the log of the run {run!r} was written by {theirs or 'an older version'} and cannot be "
        f"read by {ours} (release/messages): let the release that began the run end it, or stop it "
        "and go on from its newest checkpoint with --resume, which begins a log of its own"
    )


def _digest(messages: Any) -> str:  # a union of structs
    schema = msgspec.json.encode(_without_prose(msgspec.json.schema(messages)), order="sorted")
    return hashlib.sha256(schema).hexdigest()[:_DIGEST_CHARACTERS]


def _without_prose(schema: Any) -> Any:  # JSON
    """Leave out what may be reworded: the same message has the same digest."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key not in _PROSE}
        return {key: _without_prose(value) for key, value in kept.items()}
    if isinstance(schema, list):
        return [_without_prose(item) for item in schema]
    return schema
