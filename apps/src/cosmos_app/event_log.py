"""What happened in a run, one JSON line each: ``events.jsonl`` of its directory.

It is for people and for pictures. What a controller recovers from is its log in Redis; this one is
written after each commit, so a controller that is killed may leave its last turn out. When it has
grown long, it becomes ``events.jsonl.1``, instead of the one before, and begins anew::

    {"time_s": 1.5e9, "epoch": 1, "type": "GroupFinished", "replica": "rollout-0",
     "group": "train.0.17", "attempt": 0, "num_samples": 8, "num_failed": 0, "num_tokens": 25,
     "reward": 0.5, "oldest_version": 3, "newest_version": 4}
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeGuard

import msgspec

from cosmos_app.bounded_files import append_bounded, before_of
from cosmos_core.bus import Dispatch
from cosmos_core.messages import (
    Command,
    Event,
    GroupFailed,
    GroupFinished,
    LoadVersion,
    Progress,
    Stop,
    Tick,
    Train,
)

_MOST_BYTES = 256 << 20

# What happens with every group and every step; the rest is what a person looks for.
ROUTINE = frozenset(
    {"GroupFinished", "StepFinished", "VersionPublished", "VersionLoaded", "LoadVersion", "Train"}
)


class EventLog:
    """Appends events to a file; `note` never raises, so that a full disk costs only these events.

    Attributes:
        problem: why the last events were not written; empty while all is well.
    """

    def __init__(self, path: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        """Open nothing yet.

        Args:
            path: the file; what earlier controllers of the run wrote stays.
            most_bytes: the file, and the one before it, together do not grow beyond this: the
                oldest events go.
        """
        self.problem = ""
        self._path = path
        self._most_bytes = most_bytes

    def note(
        self, *, time_s: float, epoch: int, events: Sequence[Event], dispatches: Sequence[Dispatch]
    ) -> None:
        """Append what one commit made true."""
        told = [*map(_event_fields, events), *map(_dispatch_fields, dispatches)]
        lines = [
            msgspec.json.encode({"time_s": time_s, "epoch": epoch, **fields}) + b"\n"
            for fields in told
            if fields
        ]
        if lines:
            self._append(b"".join(lines))

    def _append(self, data: bytes) -> None:
        self.problem = ""
        try:
            append_bounded(self._path, data, most_bytes=self._most_bytes)
        except OSError as error:
            self.problem = f"{self._path} cannot be written: {error}"


def _event_fields(event: Event) -> dict[str, Any]:
    """Return an event as plain data, without what is said again and again."""
    if isinstance(event, Tick | Progress):
        return {}
    if isinstance(event, GroupFinished):
        return _group_fields(event)
    fields: dict[str, Any] = msgspec.to_builtins(event)
    if isinstance(event, GroupFailed):
        fields["group"] = str(event.group)
    return fields


def _group_fields(event: GroupFinished) -> dict[str, Any]:
    done = [sample for sample in event.samples if sample.status == "completed"]
    return {
        "type": "GroupFinished",
        "replica": event.replica,
        "group": str(event.group),
        "attempt": event.attempt,
        "num_samples": len(done),
        "num_failed": len(event.samples) - len(done),
        "num_tokens": sum(sample.num_tokens for sample in done),
        "reward": sum(sample.reward for sample in done) / len(done) if done else None,
        "oldest_version": min((sample.oldest_version for sample in done), default=None),
        "newest_version": max((sample.newest_version for sample in done), default=None),
    }


def _dispatch_fields(dispatch: Dispatch) -> dict[str, Any]:
    if dispatch.command is None:
        return {"type": "Notice", "replica": dispatch.replica, "notice": dispatch.notice}
    fields = _command_fields(dispatch.command)
    return {**fields, "replica": dispatch.replica} if fields else {}


def _command_fields(command: Command) -> dict[str, Any]:
    match command:
        case Train():
            return {"type": "Train", "step": command.step, "num_groups": len(command.groups)}
        case LoadVersion():
            return {
                "type": "LoadVersion",
                "version": command.version,
                "holder": command.holder,
            }
        case Stop():
            return {"type": "Stop", "reason": command.reason}
        case _:
            return {}


def parse_events(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Read lines of a log; one that is torn or not an event is passed over."""
    found = list[dict[str, Any]]()
    for line in lines:
        try:
            event: Any = json.loads(line)
        except ValueError:
            continue
        if _is_event(event):
            found.append(event)
    return found


def _is_event(record: Any) -> TypeGuard[dict[str, Any]]:
    """Tell whether a record has what everybody reads of an event."""
    if not isinstance(record, dict):
        return False
    wanted = {"time_s": (int, float), "type": str, "replica": (str, NoneType)}
    return all(isinstance(record.get(name), kind) for name, kind in wanted.items())


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run, oldest first; none where nothing was recorded."""
    for part in (before_of(path), path):
        if part.exists():
            with part.open("rb") as file:
                for line in file:
                    yield from parse_events([line])


def _wanted(event: Mapping[str, Any]) -> str:
    wishes = {"rollout": event["rollouts"], "policy": event.get("policies", -1)}
    return " and ".join(f"{n} {role} replicas" for role, n in wishes.items() if n >= 0)


_SENTENCES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "ReplicaJoined": lambda e: f"joined as {e['role']} at version {e['version']}",
    "ReplicaLeft": lambda e: f"left: {e['reason']}",
    "GroupFinished": lambda e: (
        f"finished group {e['group']}: {e['num_samples']} samples, {e['num_tokens']} tokens, "
        f"versions {e['oldest_version']} to {e['newest_version']}"
        + (f", {e['num_failed']} failed" if e["num_failed"] else "")
    ),
    "GroupFailed": lambda e: f"failed on group {e['group']}: {e['reason']}",
    "StepFinished": lambda e: f"finished step {e['step'] + 1}",
    "VersionPublished": lambda e: f"published version {e['version']}",
    "PublicationSkipped": lambda e: (
        f"skipped publishing version {e['version']}, for want of room: {e['held_by']}"
    ),
    "VersionLoaded": lambda e: (
        f"loaded version {e['version']}: {1e3 * e['transfer_s']:.0f} ms on its way, "
        f"generation stood still for {1e3 * e['stall_s']:.0f} ms"
    ),
    "LoadFailed": lambda e: f"could not load version {e['version']}: {e['reason']}",
    "CheckpointSaved": lambda e: (
        f"saved a checkpoint after step {e['step'] + 1}" if e["path"] else "has nothing to save"
    ),
    "StopRequested": lambda e: f"somebody asked the run to stop: {e['reason']}",
    "ScaleRequested": lambda e: f"somebody asked for {_wanted(e)}",
    "Train": lambda e: f"is to train step {e['step'] + 1} on {e['num_groups']} groups",
    "LoadVersion": lambda e: (
        f"is to load version {e['version']}" + (f" from {e['holder']}" if e.get("holder") else "")
    ),
    "Stop": lambda e: f"is to stop: {e['reason']}",
    "Notice": lambda e: f"is told: {e['notice']}",
}


def tell_event(event: Mapping[str, Any]) -> str:
    """Say in a few words what happened; the replica's name stands before it."""
    sentence = _SENTENCES.get(event["type"])
    try:
        return sentence(event) if sentence else str(event["type"])
    except (KeyError, TypeError, ValueError):
        return f"{event['type']} (its record is not whole)"
