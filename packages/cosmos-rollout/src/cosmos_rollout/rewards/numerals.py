r"""Numbers as people write them, told so that math-verify reads all of them.

It takes ``3 1/2`` for 3 - 1, ``12\,345`` for 12 + 345, ``0.\overline{3}`` for 0, ``1.5e3`` for a
product with Euler's number, and of ``33\frac13\%`` the 33.
"""

import re
from decimal import Decimal
from typing import Final

_SPACE: Final = r"(?:\\[,;:! ]|~)"
_WHOLE: Final = r"\d{1,18}"  # Python reads no more than some thousand digits
_END: Final = r"(?!\w|\.\d)"
_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?: \d{3})+(?!\d)")
_MIXED = re.compile(rf"(?<![\d.^_/])({_WHOLE})(?: |{_SPACE})+({_WHOLE}) ?/ ?({_WHOLE}){_END}")
_MIXED_PERCENT = re.compile(r"(\d\s*\\[dt]?frac(?:\{\d+\}\{\d+\}|\s*\d\s*\d))\s*\\?%")
_POWER = re.compile(rf"(?<![\w.\\])(?:\d+\.\d+e[+-]?|\d+e\+?)\d{{1,2}}{_END}")  # 5e-3: 5e less 3
_REPEATING = re.compile(
    rf"(?<![\d.])({_WHOLE})\.(\d{{0,18}})\\(?:overline|bar|dot) ?(?:\{{({_WHOLE})\}}|(\d)(?!\d))"
)


def readable(text: str) -> str:
    r"""Return a text with its numbers told otherwise.

    Args:
        text: in LaTeX or words. ``1 000`` stays two numbers; see `readable_formula`.
    """
    text = _REPEATING.sub(_fraction, text)
    text = _THOUSANDS.sub(lambda found: re.sub(_SPACE, "", found[0]), text)
    text = _MIXED.sub(_improper, text)
    text = _MIXED_PERCENT.sub(r"\1", text)
    return _POWER.sub(_of_ten, text)


def readable_formula(text: str) -> str:
    """Return mathematics with its numbers told otherwise; ``1 000`` is one, as it is shown."""
    return readable(_SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text))


def _fraction(found: re.Match[str]) -> str:
    whole, first, repeated = found[1], found[2], found[3] or found[4]
    above = int(whole + first + repeated) - int(whole + first)
    return rf"\frac{{{above}}}{{{10 ** len(first) * (10 ** len(repeated) - 1)}}}"


def _improper(found: re.Match[str]) -> str:
    whole, above, below = int(found[1]), int(found[2]), int(found[3])
    return f"{whole * below + above}/{below}"


def _of_ten(found: re.Match[str]) -> str:
    return format(Decimal(found[0]), "f")
