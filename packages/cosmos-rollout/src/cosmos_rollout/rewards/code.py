"""A reward for programs: the response's last code block is run against the data row's tests."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from cosmos_rollout.errors import RewardError
from cosmos_rollout.rewards.questions import called_as_by_pytest, what_is_not_run
from cosmos_rollout.rewards.sandbox import (
    SandboxLimits,
    SandboxProtection,
    passes_test,
    run_program,
    sandbox_protection,
)
from cosmos_rollout.rewards.scoring import RewardFunction, RewardInput

_BLOCK = re.compile(
    r"(?:^([ \t]+))?```[ \t]*+([\w+#.-]*+)[^\n`]*+\n(.*?)```", re.DOTALL | re.MULTILINE
)
_PYTHON = frozenset({"", "python", "python3", "py", "py3"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeReward:
    """How many of a data row's tests the program in the response passes.

    The program is the last fenced code block that is marked as Python; without one, the last that
    is not marked; or the whole response if it has none. The row's field ``field`` holds the tests:
    a text, run after the program, as in ``assert f(2) == 4``; or a list, of such texts or of
    ``{"input": ..., "output": ...}``, standard input and what has to be printed, blanks at line
    ends aside. Of a text that only defines functions and classes, functions without arguments
    whose names begin with ``test`` are called, as pytest does, and what it imports of ``solution``
    is the program's (KodCode has such tests); if there are none, it is refused.

    What is expected stays out of the program's reach: of ``assert f(2) == 4`` it is only asked for
    ``f(2)``, a plain value or one of a class that derives from one. So leaving early, printing
    marks, patching functions and results that equal everything are worth nothing. Assertions in
    loops and conditions, and those that compare with no literal, are judged beside the program:
    prefer the former where a model learns to cheat.

    Attributes:
        kind: selects this reward.
        field: the field of the data row that holds the tests.
        score: "all": 1 if every test passes, 0 otherwise; "share": the fraction that passes.
        timeout_s: seconds for one test; the pool's ``timeout_s`` is for all of them.
        memory_mib: address space of each of the program's processes.
        max_processes: processes and threads that the program may have at a time.
        readable: files and folders that programs may read though they lie in the user's home, in
            the folder where the run was started or in a temporary one, of which they see nothing.
        isolation: "preferred" or "required": whether a system is good enough that cannot take the
            network away, or protect files. `cosmos-app doctor` tells what this one can.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["code"] = "code"
    field: str = "tests"
    score: Literal["all", "share"] = "all"
    timeout_s: float = 2.0
    memory_mib: int = 512
    max_processes: int = 64
    readable: tuple[str, ...] = ()
    isolation: Literal["preferred", "required"] = "preferred"
    name: str = "code"
    weight: float = 1.0

    def __post_init__(self) -> None:
        self._limits(self.timeout_s)

    def build(self) -> RewardFunction:
        """Try the sandbox once, say what it lacks here, and return the function.

        Raises:
            RewardError: if something that is to be readable is not there.
            SandboxError: if isolation is required and the system has none.
        """
        for path in self.readable:
            if not Path(path).expanduser().exists():
                raise RewardError(
                    f"reward {self.name}: {path!r}, which programs may read, is not there"
                )
        for gap in _gaps(sandbox_protection(self._limits(60.0))):
            logging.getLogger(__name__).warning("reward %s: %s", self.name, gap)
        return self._score

    def _limits(self, timeout_s: float) -> SandboxLimits:
        return SandboxLimits(
            timeout_s=timeout_s,
            memory_mib=self.memory_mib,
            max_processes=self.max_processes,
            readable=self.readable,
            namespaces=self.isolation,
        )

    def _score(self, sample: RewardInput) -> float:
        tests = _tests(sample.fields.get(self.field), self)
        program = last_block(sample.response)
        passed = 0
        for test in tests:
            passes = self._passes(program, test)
            if self.score == "all" and not passes:
                return 0.0
            passed += passes
        return passed / len(tests)

    def _passes(self, program: str, test: str | tuple[str, str]) -> bool:
        limits = self._limits(self.timeout_s)
        if isinstance(test, str):
            return passes_test(program, test, limits)
        limits = replace(limits, output_mib=limits.file_mib)  # all that it can print
        result = run_program(program, limits, stdin=test[0])
        return result.exit_code == 0 and _lines(result.stdout) == _lines(test[1])


def _gaps(found: SandboxProtection) -> Iterator[str]:
    """Say what programs can do here that they cannot where the kernel allows everything."""
    if not found.no_network:
        yield (
            "the network stays reachable to programs: this system gives no user name spaces "
            "(isolation = 'required' refuses to run then)"
        )
    if found.files == "rules":
        yield "files are protected by Landlock: programs share /dev/shm, and may change modes"
    if found.files == "open":
        yield "programs can read, write and delete what this user can"


def last_block(text: str) -> str:
    """Return the last fenced block that says it is Python.

    Without one, the last that says nothing, which may be what a program prints; else the text.
    """
    blocks = [match for match in _BLOCK.finditer(text) if match[2].lower() in _PYTHON]
    found = [match for match in blocks if match[2]] or blocks
    if not found:
        return text
    depth = len(found[-1][1] or "")  # of the fence, as of one that stands in a list
    return re.sub(rf"(?m)^[ \t]{{0,{depth}}}", "", found[-1][3]) if depth else found[-1][3]


def _tests(found: Any, config: CodeReward) -> Sequence[str | tuple[str, str]]:  # found: from JSON
    many = cast(Sequence[Any], found) if isinstance(found, list | tuple) else [found]
    tests = [_test(test) for test in many]
    if not tests or None in tests:
        raise RewardError(
            f"reward {config.name}: field {config.field!r} of the data row has to be a test or a "
            f"list of tests, each a text or an object with 'input' and 'output'"
        )
    for test in tests:
        problem = what_is_not_run(test) if isinstance(test, str) else ""
        if problem:
            raise RewardError(
                f"reward {config.name}: field {config.field!r} of the data row has a test that "
                f"tells no program from another: {problem}"
            )
    return cast(Sequence[str | tuple[str, str]], tests)


def _test(found: Any) -> str | tuple[str, str] | None:  # found: from JSON
    if isinstance(found, str):
        return called_as_by_pytest(found) if found.strip() else None  # any program would pass
    if isinstance(found, Mapping):
        sides = [cast(Mapping[str, Any], found).get(name) for name in ("input", "output")]
        if all(isinstance(side, str | int | float) for side in sides):
            return str(sides[0]), str(sides[1])
    return None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
