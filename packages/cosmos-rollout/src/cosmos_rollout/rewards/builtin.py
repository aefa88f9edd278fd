"""The rewards that come with the package, each settings beside a function of one sample.

All of them are 1 or 0 except `LengthReward`; weights and sums are `RewardPool`'s business.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cosmos_rollout.errors import RewardError
from cosmos_rollout.rewards.numerals import readable, readable_formula
from cosmos_rollout.rewards.scoring import RewardFunction, RewardInput, answer_of
from cosmos_rollout.user_code import check_reference, load_callable

_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?=[^\s{$]))")
_MARKED = re.compile(r"\$|\\\(|\\\[")
_COMMAND = re.compile(r"\\(?:text|mbox)[a-z]*\s*\{[^{}]*\}|\\[A-Za-z]+")
_IN_WORDS = re.compile(r"[A-Za-z]{2,}(?:[\s,]+[A-Za-z]{2,}|\s*:)|####|\n")

COMPARE_S = 2
"""Seconds for one comparison by math-verify, after which the two are not equal. A tower of powers,
which models write, takes all of them, and a response may have several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactReward:
    """1 if the response is the answer, 0 otherwise.

    Attributes:
        kind: selects this reward.
        name: its name in trajectories and reports.
        weight: its factor in the total.
        after: compare what follows the last occurrence of this text only; empty: everything.
        ignore_case: whether A and a are equal.
    """

    kind: Literal["exact"] = "exact"
    name: str = "exact"
    weight: float = 1.0
    after: str = ""
    ignore_case: bool = False

    def build(self) -> RewardFunction:
        """Return the function."""
        return self._score

    def _score(self, sample: RewardInput) -> float:
        response, answer = sample.response, answer_of(sample, self.name)
        if self.after:
            _, found, response = response.rpartition(self.after)
            if not found:
                return 0.0
        if self.ignore_case:
            response, answer = response.casefold(), answer.casefold()
        return float(" ".join(response.split()) == " ".join(answer.split()))


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxedMathReward:
    r"""1 if the last ``\boxed{...}`` equals the answer as mathematics: 0.5, 1/2, \frac12.

    Attributes:
        kind: selects this reward.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["boxed_math"] = "boxed_math"
    name: str = "boxed_math"
    weight: float = 1.0

    def build(self) -> RewardFunction:
        """Import math-verify, which takes a second, and return the function."""
        from math_verify import parse, verify

        from_answer = read_answers(parse)

        def score(sample: RewardInput) -> float:
            check_main_thread(self.name)
            answer, boxed = answer_of(sample, self.name), last_boxed(sample.response)
            if boxed is None:
                return 0.0
            wanted = from_answer(answer)
            if not wanted:
                raise RewardError(f"reward {self.name}: the answer {answer!r} is no mathematics")
            said = parse(f"${readable_formula(boxed)}$")
            return float(verify(wanted, said, timeout_seconds=COMPARE_S))

        return score


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatReward:
    """1 if the whole response matches a regular expression (``.`` matches newlines too).

    Attributes:
        kind: selects this reward.
        pattern: the regular expression.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["format"] = "format"
    pattern: str
    name: str = "format"
    weight: float = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r}: {error}") from error

    def build(self) -> RewardFunction:
        """Return the function."""
        return self._score

    def _score(self, sample: RewardInput) -> float:
        return float(re.fullmatch(self.pattern, sample.response, re.DOTALL) is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthReward:
    """0 up to ``target`` response tokens, then falling linearly to -1 at ``limit``.

    The soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    Attributes:
        kind: selects this reward.
        target: tokens that cost nothing.
        limit: tokens from which on it is -1.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["length"] = "length"
    target: int
    limit: int
    name: str = "length"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.target < self.limit:
            raise ValueError(f"target {self.target} has to be below limit {self.limit}")

    def build(self) -> RewardFunction:
        """Return the function."""
        return self._score

    def _score(self, sample: RewardInput) -> float:
        over = (sample.num_response_tokens - self.target) / (self.limit - self.target)
        return -min(1.0, max(0.0, over))


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonReward:
    """A function of the user's: ``def reward(sample: RewardInput) -> float``.

    Attributes:
        kind: selects this reward.
        function: ``module:function``, or ``path/to/file.py:function``.
        name: its name in trajectories and reports; the function's if empty.
        weight: its factor in the total.
    """

    kind: Literal["python"] = "python"
    function: str
    name: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        function = check_reference(self.function)
        if not self.name:
            object.__setattr__(self, "name", function)

    def build(self) -> RewardFunction:
        """Import the module and return the function.

        Raises:
            UserCodeError: if there is no such module or function.
        """
        return load_callable(self.function)


def check_main_thread(name: str) -> None:
    """Refuse to ask math-verify where its time limit, a signal, does not work.

    Raises:
        RewardError: says what to do.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RewardError(
            f"reward {name} limits its time by a signal, which wants the main thread of a process: "
            "use RewardPool, whose workers have one"
        )


def read_answers(parse: Callable[[str], list[Any]]) -> Callable[[str], list[Any]]:
    r"""Return what reads the answer of a data row as mathematics; empty if it is none.

    Of an answer with marks (``$2x$``, ``\boxed{2x}``) or in words, math-verify finds what is marked
    or the last number. Of a bare one, as in ``2x`` or ``(1, 2)``, that would be a part of it: it is
    read as the mathematics that it is.
    """

    def read(answer: str) -> list[Any]:
        boxed = last_boxed(answer)
        if boxed is not None:
            return parse(f"${readable_formula(boxed)}$")
        if _MARKED.search(answer) or _IN_WORDS.search(_COMMAND.sub(" ", answer)):
            told = readable(answer)
            return parse(told) or parse(f"${told}$")
        told = readable_formula(answer)
        return parse(f"${told}$") or parse(told)

    return read


def last_boxed(text: str) -> str | None:
    r"""Return what the last ``\boxed{...}`` holds, braces inside it balanced; None without one.

    So are ``\boxed {...}`` and ``\fbox{...}`` read, and ``\boxed 7``.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    begin = boxes[-1].end()
    if not boxes[-1][0].endswith("{"):
        return text[begin:].split("$", 1)[0].split(maxsplit=1)[0].rstrip(".,;:") or None
    depth = 0
    for position in range(begin, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            if depth == 0:
                return text[begin:position]
            depth -= 1
    return None
