"""Options that several commands share, handed to each as one value."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

__all__ = ["bundled"]


def bundled(
    command: Callable[..., Any],
    name: str,
    kind: type[Any],
    options: Sequence[Callable[..., Any]],
) -> Callable[..., Any]:
    """Give a command some options, which it gets together as one argument.

    Args:
        command: The function behind the command.
        name: Of that argument.
        kind: A dataclass whose fields are the options.
        options: Decorators of click, in the order of the help page.
    """
    own = [item.name for item in fields(kind)]

    @functools.wraps(command)
    def with_value(**values: Any) -> Any:
        mine = {field: values.pop(field) for field in own}
        return command(**values, **{name: kind(**mine)})

    for option in reversed(options):
        with_value = option(with_value)
    # Options that the command has of its own come after these.
    return with_value
