"""How far an evaluation is: a bar on a terminal, a line at each tenth anywhere else."""

import contextlib
from collections.abc import Callable, Generator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Note = Callable[[int, Sequence[float]], None]
"""Takes how many prompts are done, and the rewards of those that were answered."""
_LINES = 10


@contextlib.contextmanager
def showing_progress(total: int, console: Console) -> Generator[Note]:
    """Give what is to be called after each prompt.

    Args:
        total: prompts in all.
        console: where it is shown.
    """
    if not console.is_terminal:
        yield _in_lines(total, console)
        return
    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, rewards: bar.update(task, completed=done, description=_mean_of(rewards))


def _in_lines(total: int, console: Console) -> Note:
    told = 0

    def note(done: int, rewards: Sequence[float]) -> None:
        nonlocal told
        if (tenth := _LINES * done // total) > told:
            told = tenth
            said = f"{done} of {total} prompts  {_mean_of(rewards)}"
            console.print(said.rstrip(), soft_wrap=True, markup=False, highlight=False)

    return note


def _mean_of(rewards: Sequence[float]) -> str:
    return f"held-out reward so far {sum(rewards) / len(rewards):.3f}" if rewards else ""
