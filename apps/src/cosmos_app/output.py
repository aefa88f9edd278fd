"""What several commands print, for programs and for people."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_json(value: object) -> None:
    """Write one JSON document to standard output, as `json_document` has it."""
    click.echo(json_document(value))


def json_document(value: object) -> str:
    """Return a value as JSON: numbers that it does not have are null, the rest of these is text."""
    return json.dumps(finite(value), indent=2, default=str, allow_nan=False)


def finite(value: Any) -> Any:
    """Put ``None`` for numbers that JSON does not have, in whatever holds them."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(item) for key, item in cast(dict[Any, Any], value).items()}
        case list() | tuple():
            return [finite(item) for item in cast(Iterable[Any], value)]
        case _:
            return value


def print_facts(title: str, facts: Iterable[tuple[str, str]], console: Console) -> None:
    """Show names and values to a person, one below the other."""
    table = Table(show_header=False, title=Text(title))
    for name, value in facts:
        table.add_row(name, Text(value))
    console.print(table)


def from_to(by_step: Mapping[int, float]) -> str:
    """Return the first of some figures and the last, in words."""
    values = list(by_step.values())
    return f"{values[0]:.4f} -> {values[-1]:.4f}" if values else "none"
