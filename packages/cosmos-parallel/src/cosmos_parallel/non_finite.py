"""Finding out what was not finite in a step, and keeping it to be looked at."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from cosmos_parallel.gradients import local_part

_SHOWN = 5
Batch = TypeVar("Batch")


@runtime_checkable
class NamesSamples(Protocol):
    """A batch that knows what its samples are called."""

    @property
    def names(self) -> Sequence[str]:
        """One name for each sample."""
        ...


@dataclass(frozen=True, slots=True)
class Culprits(Generic[Batch]):
    """What this rank found.

    Attributes:
        problem: in words, naming samples or gradients.
        batches: the micro-batches whose loss was not finite; all of them if every loss was finite
            and a gradient was not.
    """

    problem: str
    batches: tuple[Batch, ...]


def find_culprits(
    batches: Sequence[Batch], totals: Sequence[Tensor], model: nn.Module
) -> Culprits[Batch]:
    """Look for what was not finite in this rank's part of a step.

    Args:
        batches: in the order of their passes.
        totals: the loss sum of each.
        model: with the gradients of the step, summed over ranks.
    """
    values = [float(total) for total in totals]
    wrong = [
        (index, value)
        for index, value in enumerate(values)
        if not torch.isfinite(torch.tensor(value))
    ]
    if wrong:
        told = [f"micro-batch {index}{_of(batches[index])} has loss {v}" for index, v in wrong]
        return Culprits(_list(told), tuple(batches[index] for index, _ in wrong))
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not local_part(parameter.grad).isfinite().all()
    ]
    if names:
        return Culprits(f"gradients are not finite: {_list(names)}", tuple(batches))
    return Culprits("nothing on this rank; look at the others", ())


def dump(culprits: Culprits[Batch], directory: Path, name: str) -> str:
    """Write the batches down, by ``torch.save``, and say where; nothing if there are none.

    A disk that is full or not there costs the file, not the run.

    Args:
        culprits: what was found.
        directory: where to; other replicas may write there as well.
        name: of the file, without its suffix. One that is there stays: the next is ``name.1.pt``.
    """
    if not culprits.batches:
        return ""
    try:
        path = _written(culprits, directory, name)
    except (OSError, RuntimeError) as error:
        return f"; not written to {directory}: {error}"
    return f"; written to {path}"


def _written(culprits: Culprits[Batch], directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path, attempt = directory / f"{name}.pt", 0
    while True:
        try:
            with path.open("xb") as stream:
                torch.save({"problem": culprits.problem, "batches": culprits.batches}, stream)
        except FileExistsError:
            attempt += 1
            path = directory / f"{name}.{attempt}.pt"
        else:
            return path


def _of(batch: object) -> str:
    names = list(batch.names) if isinstance(batch, NamesSamples) else []
    return f" ({_list(names)})" if names else ""


def _list(words: Sequence[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more
