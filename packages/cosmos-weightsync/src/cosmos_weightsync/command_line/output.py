"""What the commands say: tables and bars for people on stderr and stdout, JSON for scripts."""

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from cosmos_weightsync.errors import WeightSyncError
from cosmos_weightsync.watching import Watch

__all__ = [
    "echo_table",
    "examples",
    "fail",
    "human_bytes",
    "report",
    "show_errors",
    "show_progress",
    "show_work",
]

_HINTS: Mapping[str, str] = {
    "PeerLostError": "Is the other side still running, and reachable from here? Run this again to "
    "go on where it stopped.",
    "DeadlineError": "Run this again to go on where it stopped.",
    "StorageFullError": "Make room, then run this again: what was fetched is kept.",
    "DigestError": "Run this again: what is damaged is fetched anew. If it happens again, "
    "suspect the disk or the memory of the other side.",
    "CorruptFileError": "Fetch or publish it again.",
    "UnknownTensorError": "Do both sides use the same names? Compare them with "
    "'cosmos-weightsync plan A A' on either.",
    "ProtocolError": "Give the endpoint and token exactly as 'push' printed them.",
}


def examples(*commands: str) -> str:
    """The end of a help page; the mark in front keeps click from joining the lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def human_bytes(count: float) -> str:
    """1536 is 1.5 KB."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def report(content: Mapping[str, Any], *, as_json: bool) -> None:
    """Results: one JSON object on one line, or a table."""
    if as_json:
        click.echo(json.dumps(content))
        return
    width = max(map(len, content), default=0)
    for key, value in content.items():
        is_bytes = key.endswith("bytes") and isinstance(value, int)
        text = human_bytes(value) if is_bytes else _text(value)
        # Never wrapped: a command that is shown is copied.
        for number, line in enumerate(text.split("\n")):
            title = "" if number else key.replace("_", " ")
            click.echo(f" {title:<{width}}  {line}".rstrip())


def echo_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table with a line of titles; all columns but the first are numbers."""
    table = Table(box=None)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@contextlib.contextmanager
def show_progress(what: str, total: int, *, as_json: bool) -> Generator[Callable[[int], None]]:
    """A bar on stderr that counts bytes; the function moves it on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=as_json) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, advance=count)


@contextlib.contextmanager
def show_work(what: str, *, as_json: bool) -> Generator[Watch]:
    """What is being worked on and for how long, on a terminal's stderr, until it is done.

    The function says which part of it is under way, and which share of that is done.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    is_hidden = as_json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task(what, total=None)

        def tell(part: str, share: float) -> None:
            progress.update(task, description=f"{what}: {part}", total=1.0, completed=share)

        yield tell


def fail(message: str, status: int = 1) -> NoReturn:
    """Say why on stderr and end with this status."""
    click.echo(message, err=True)
    raise SystemExit(status)


@contextlib.contextmanager
def show_errors(if_interrupted: str = "") -> Generator[None]:
    """End with one line and what to do about it, never with a traceback.

    Args:
        if_interrupted: What to do after Ctrl-C.
    """
    try:
        yield
    except WeightSyncError as error:
        hint = _HINTS.get(type(error).__name__, "")
        fail(f"Error: {error}" + (f"\n{hint}" if hint else ""))
    except KeyboardInterrupt:
        fail(f"\nInterrupted. {if_interrupted}".rstrip(), 130)
