"""The ranges of a config's numbers, of which TOML may also say nan and inf."""

import math
from collections.abc import Callable, Mapping, Sequence

from cosmos_wfm.errors import WfmConfigError


def check_at_least(subject: str, config: object, **least: float) -> None:
    """Refuse a config one of whose fields is too small, or is not finite.

    Args:
        subject: what the config is of, for the error.
        config: has the fields.
        **least: what each of them must be at least.

    Raises:
        WfmConfigError: names the field.
    """
    for name, low in least.items():
        value = getattr(config, name)
        if not low <= value < math.inf:
            raise WfmConfigError(f"{subject}: {name} is {value}; it must be {low:g} or more")


def check_positive(subject: str, config: object, *names: str) -> None:
    """Refuse a config one of whose fields is not above 0; infinity is.

    Args:
        subject: what the config is of, for the error.
        config: has the fields.
        *names: of the fields.

    Raises:
        WfmConfigError: names the field.
    """
    _check_each(subject, config, names, lambda value: value > 0, "above 0")


def check_finite(subject: str, config: object, *names: str) -> None:
    """Refuse a config one of whose fields is infinite or no number.

    Args:
        subject: what the config is of, for the error.
        config: has the fields.
        *names: of the fields.

    Raises:
        WfmConfigError: names the field.
    """
    _check_each(subject, config, names, math.isfinite, "finite")


def check_unused(subject: str, config: object, unused: Mapping[str, object], why: str) -> None:
    """Refuse a config that sets what has no effect beside the rest of it.

    Args:
        subject: what the config is of, for the error.
        config: has the fields.
        unused: the fields that have none, with the values that they have if nobody sets them.
        why: what they would have one with.

    Raises:
        WfmConfigError: names the field.
    """
    for name, default in unused.items():
        value = getattr(config, name)
        if value != default:
            raise WfmConfigError(
                f"{subject}: {name} is {value}, but means something with {why} only"
            )


def _check_each(
    subject: str, config: object, names: Sequence[str], fits: Callable[[float], bool], words: str
) -> None:
    for name in names:
        value: float = getattr(config, name)
        if not fits(value):
            raise WfmConfigError(f"{subject}: {name} is {value}; it must be {words}")
