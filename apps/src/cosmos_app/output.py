"""What several commands print, for programs and for people."""

import json
import sys
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table


def print_json(value: object) -> None:
    """Write one JSON document to standard output; what JSON cannot say becomes text."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_facts(title: str, facts: Iterable[tuple[str, str]], console: Console) -> None:
    """Show names and values to a person, one below the other."""
    table = Table(show_header=False, title=title)
    for name, value in facts:
        table.add_row(name, value)
    console.print(table)


def from_to(by_step: Mapping[int, float]) -> str:
    """Return the first of some figures and the last, in words."""
    values = list(by_step.values())
    return f"{values[0]:.4f} -> {values[-1]:.4f}" if values else "none"
