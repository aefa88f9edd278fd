"""Steps whose loss or gradient was not finite, told to who started a run."""

from collections.abc import Callable

from rich.markup import escape

from cosmos_core.metrics import MetricRecord


def bad_step_line(step: int, problem: str) -> str:
    """Return what a person is told of a step that changed nothing, and what to do about it.

    Args:
        step: counted from 1.
        problem: what was not finite, of which samples and on which rank.
    """
    return (
        f"step {step} changed nothing: {problem}. Look at these samples (torch.load reads the "
        "file), and if there are more such steps, lower learner.optimizer.lr or "
        "learner.max_grad_norm; more than learner.max_non_finite_steps in a row end the run"
    )


class BadStepWarning:
    """Says to who started a run that a step changed nothing.

    Args:
        say: says it, with rich's markup.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[int] = set()

    def look(self, record: MetricRecord) -> None:
        """Take a measurement in; replicas that took the step together say the same of it."""
        if record.note and record.step not in self._told:
            self._told.add(record.step)
            line = bad_step_line(record.step + 1, record.note)
            self._say(f"[yellow]{escape(line)}[/]")
