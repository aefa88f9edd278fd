"""What settings may be: type checkers see others, and Python takes them without a word."""

from typing import Any, get_args

from cosmos_weightsync.errors import ConfigurationError

__all__ = ["check_choice", "check_wait"]


def check_choice(setting: str, value: object, choices: Any) -> None:
    """Refuse a name that is none of a ``Literal``'s.

    Raises:
        ConfigurationError: names the setting and what there is.
    """
    if value not in get_args(choices):
        there = ", ".join(map(repr, get_args(choices)))
        raise ConfigurationError(f"{setting} is {value!r}; it must be one of {there}")


def check_wait(setting: str, seconds: float) -> None:
    """Refuse a time that is over before it begins, or is no number.

    Raises:
        ConfigurationError: names the setting.
    """
    if not seconds > 0:
        raise ConfigurationError(f"{setting} is {seconds!r}; it must be above 0")
