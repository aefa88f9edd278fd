"""What can be wrong with a configuration, one record for each problem, all raised together."""

from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_core.errors import CosmosError


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigProblem:
    """One thing to correct.

    Attributes:
        path: dotted path of the key, "" for the whole file.
        problem: what is wrong and what was found.
        hint: what would be right; "" where nothing can be said.
        source: where it was written, ``file:line`` or the override; "" if unknown.
    """

    path: str
    problem: str
    hint: str = ""
    source: str = ""

    def __str__(self) -> str:
        start = f"{self.source}: " if self.source else ""
        end = f"; {self.hint}" if self.hint else ""
        return f"{start}{self.problem}{end}"


class ConfigError(CosmosError, ValueError):
    """Raised by `load_config` and `config_from_json`, once, with every problem found.

    Attributes:
        problems: at least one, in the order of the fields.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        if len(lines) > 1:
            lines = [
                f"{len(lines)} problems in the configuration",
                *(f"  {line}" for line in lines),
            ]
        super().__init__("\n".join(lines))
