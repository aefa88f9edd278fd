"""Rewards that look for the answer in a text: a letter, the number of GSM8K, mathematics.

All of them are 1 or 0.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal

from cosmos_rollout.errors import RewardError
from cosmos_rollout.rewards.builtin import COMPARE_S, check_main_thread, last_boxed, read_answers
from cosmos_rollout.rewards.numerals import readable, readable_formula
from cosmos_rollout.rewards.scoring import RewardFunction, RewardInput, answer_of

_CLOTHES = r"(?:[\s*_$(\[{>\"'`\u201c]|\\\(|\\(?:text|math)[a-z]*)*+"
_PRONOUN = r"(?:(?i:\s++is)?(?:\s*+:)?\s++I(?:['\u2019]|\s++(?!(?:is|because|since|as)\b)[a-z]))"
_IS = r"(?i:\s++(?:is|(?:would|should|must)\s++be)(?:\s++(?:therefore|thus|hence))?|\u662f|\u4e3a)"
_THE_OPTION = r"(?:(?i:(?:the\s++)?(?:option|choice|letter))\b[\s*_]*+)?"
_WIDE = str.maketrans("\uff1a\uff08\uff09\uff0e", ":().")
_SAID_OF_IT = r"(?:is|isn|are|was|and|or|not|can|cannot|would|does|has|seems)\b"
# of a small letter: neither "a matter of taste" nor "e.g. Paris" begins with one
_AT_AN_END = r"(?=[ \t*_$\"'`\u201d]*+(?:\\?[)}\]]|[.,;:<](?!\w)|\n|\Z))"
_MINUS = "\u2212"
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoiceReward:
    r"""1 if the letter chosen is the answer's.

    The choice is, in this order: the last ``\boxed{B}``; the last "answer is (B)", "**Answer:** B",
    "<answer>B", "answer must be option B" and the like; the last "answer B"; the last "option B" or
    "choice B"; the response, if it is nothing but a letter, as in "(B)", or begins "B.", "B)" or
    "(B) " and does not go through the options, A first. "The answer I chose" names no option I.
    Small letters are read where no capital one is chosen; in a sentence where it, or a part, ends.

    Attributes:
        kind: selects this reward.
        letters: the letters there are, as capitals.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["multiple_choice"] = "multiple_choice"
    letters: str = "ABCDEFGHIJ"
    name: str = "multiple_choice"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.letters.isalpha() or not self.letters.isupper():
            raise ValueError(f"letters have to be capital letters, found {self.letters!r}")

    def build(self) -> RewardFunction:
        """Return the function."""
        in_capitals = _choice_of(self.letters, r"\b")
        in_small = _choice_of(self.letters.lower(), _AT_AN_END)

        def choice(text: str) -> str | None:
            found = in_capitals(text) or in_small(text)
            return found and found.upper()

        def score(sample: RewardInput) -> float:
            wanted = choice(answer_of(sample, self.name))
            if wanted is None:
                raise RewardError(
                    f"reward {self.name}: the answer {sample.answer!r} is no letter of "
                    f"{self.letters}"
                )
            return float(choice(sample.response) == wanted)

        return score


@dataclass(frozen=True, kw_only=True, slots=True)
class Gsm8kReward:
    """1 if the number after the last ``####`` is the answer (Cobbe et al. 2021, arXiv:2110.14168).

    Thousands separators and a dollar sign are left out; numbers are compared as decimals, so 18
    and 18.00 are equal. The data row's answer may be the number, or the set's own worked answer.

    Attributes:
        kind: selects this reward.
        method: "strict" wants the ``####``; "flexible" takes the last number of a response without.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["gsm8k"] = "gsm8k"
    method: Literal["strict", "flexible"] = "strict"
    name: str = "gsm8k"
    weight: float = 1.0

    def build(self) -> RewardFunction:
        """Return the function."""
        return self._score

    def _score(self, sample: RewardInput) -> float:
        answer = answer_of(sample, self.name)
        wanted = _number(answer.rpartition("####")[2])
        if wanted is None:
            raise RewardError(f"reward {self.name}: the answer {answer!r} has no number")
        _, marked, after = sample.response.rpartition("####")
        if marked:
            return float(_number(after) == wanted)
        return float(self.method == "flexible" and _last_number(sample.response) == wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class MathReward:
    """1 if the mathematics found in the response equals the answer, boxed or not (math-verify).

    Attributes:
        kind: selects this reward.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["math"] = "math"
    name: str = "math"
    weight: float = 1.0

    def build(self) -> RewardFunction:
        """Import math-verify, which takes a second, and return the function."""
        from math_verify import parse, verify

        from_answer = read_answers(parse)

        def score(sample: RewardInput) -> float:
            check_main_thread(self.name)
            answer = answer_of(sample, self.name)
            wanted = from_answer(answer)
            if not wanted:
                raise RewardError(f"reward {self.name}: the answer {answer!r} is no mathematics")
            response, boxed = sample.response, last_boxed(sample.response)
            if boxed:
                response = response.replace(boxed, readable_formula(boxed))
            said = parse(readable(response))
            return float(verify(wanted, said, timeout_seconds=COMPARE_S))

        return score


def _choice_of(letters: str, end: str) -> Callable[[str], str | None]:
    """Return what finds the letter that a text chooses; ``None`` if it chooses none.

    Args:
        letters: those there are.
        end: pattern of what comes behind one in a sentence.
    """
    one = f"[{letters}]"
    word = rf"(?<!/)(?i:answer|\u7b54\u6848)(?!{_PRONOUN})[*_]*+"
    letter = rf"{_CLOTHES}{_THE_OPTION}{_CLOTHES}({one}){end}"
    said = [
        re.compile(rf"{word}(?:{_IS}[*_]*+\s*+:?|>|\s*+[:=]|[ *_]*+\n){letter}"),
        re.compile(rf"{word}\s*+{letter}"),
        re.compile(rf"(?<!/)(?i:choice|option)(?!{_PRONOUN})[*_]*+{_IS}?[*_]*+\s*+:?{letter}"),
    ]
    alone = re.compile(
        rf"[(\[]?({one})[)\]]?\.?|({one})[.):]\s.*|\(({one})\)\s+(?!{_SAID_OF_IT}).*", re.DOTALL
    )
    label = re.compile(rf"^[\s*(\[]*+({one})[.):\]]", re.MULTILINE)

    def choice(text: str) -> str | None:
        boxed, text = last_boxed(text), text.translate(_WIDE)
        if boxed is not None:
            text = re.sub(r"\\(?:text|math)[a-z]*|[{}]", "", boxed.translate(_WIDE))
            text = re.sub(r"\\[ ,;:]", " ", text)
        elif found := next(filter(None, (words.findall(text) for words in said)), None):
            return str(found[-1])
        match = alone.fullmatch(text.replace("*", "").strip(" \n\t\"'`$"))
        if match is None or "".join(label.findall(text)[:2]) == letters[:2]:
            return None  # it goes through the options
        return match[1] or match[2] or match[3]

    return choice


def _number(text: str) -> Decimal | None:
    """Return the first number of a text."""
    found = _NUMBER.search(text.replace(_MINUS, "-"))
    return _decimal(found[0]) if found else None


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace(_MINUS, "-"))
    return _decimal(found[-1]) if found else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
