"""Names that settings may have: type checkers see others, and Python takes them without a word."""

from typing import Any, get_args


def check_choice(
    setting: str, value: str, choices: Any, *, error: type[ValueError] = ValueError
) -> None:
    """Refuse a name that is none of a ``Literal``'s.

    Args:
        setting: which has it.
        value: the name.
        choices: the ``Literal``.
        error: what is raised.

    Raises:
        ValueError: or ``error``; names the setting and what there is.
    """
    if value not in get_args(choices):
        there = ", ".join(map(repr, get_args(choices)))
        raise error(f"{setting} is {value!r}; it must be one of {there}")
