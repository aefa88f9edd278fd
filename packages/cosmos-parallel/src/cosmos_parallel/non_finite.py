"""Finding out what was not finite in a step, telling every rank, and keeping it to be looked at.

Once gradients are summed, every rank has the NaN of one. So each rank looks at what it had before:
the losses of its passes and, if those are finite everywhere, the gradients of passes made again.
All ranks of all replicas hear what was found, and say the same of it::

    losses ─► heard by all ─► some were bad ──────────────────────────────────┐
                   └─► none was ─► passes again, gradients watched ─► heard ──┤
               problem ◄─ heard by all ◄─ who has such a batch writes it down ◄┘
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from cosmos_parallel.gradient_watch import not_finite_gradients, watched_gradients
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.passes import Pass
from cosmos_parallel.process import broadcast_bytes, gather_bytes
from cosmos_parallel.replicas import ReplicaGroup

_SHOWN = 5
_SHOWN_SAMPLES = 20
_LOSS, _GRADIENT = "has loss", "has gradients that are not finite:"
Batch = TypeVar("Batch")
Found = list[tuple[int, str]]
"""Passes by their index, and what was not finite in each: its loss, or a parameter's gradient."""


@runtime_checkable
class NamesSamples(Protocol):
    """A batch that knows what its samples are called."""

    @property
    def names(self) -> Sequence[str]:
        """One name for each sample."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BadStep(Generic[Batch]):
    """A step whose loss or gradient was not finite, as one rank has it.

    Attributes:
        model: with the gradients of the step, summed over ranks and replicas.
        passes: of this rank, in order.
        totals: the loss sum of each pass that counts.
        again: makes one pass again, forward and backward; every rank of the replica calls.
        mesh: the ranks of the replica.
        replica_group: the other replicas; ``None`` for none.
    """

    model: nn.Module
    passes: Sequence[Pass[Batch]]
    totals: Sequence[Tensor]
    again: Callable[[Pass[Batch]], object]
    mesh: TrainingMesh
    replica_group: ReplicaGroup | None

    def explain(self, directory: Path | None, name: str) -> str:
        """Say what was not finite, in which samples and on which ranks; the same on every rank.

        Every rank of every replica calls, once the step is committed; gradients are not kept.

        Args:
            directory: where ranks write down the batches that had it; ``None`` writes none.
            name: of their files, before the rank.
        """
        in_sum = not_finite_gradients(self.model)
        said, (mine, everybody) = _LOSS, self._hear("losses", self._bad_losses())
        if not _any(everybody):
            said, (mine, everybody) = _GRADIENT, self._hear("gradients", self._bad_gradients())
        if _any(everybody):
            words, indices = self._of_copy(mine, said)
        else:
            words, indices = _of_sum(in_sum), range(len(self.totals))
        if directory is not None and self._is_first_of_copy:
            batches = [self.passes[index].batch for index in indices]
            words += dump(words, batches, directory, f"{name}-rank-{self.mesh.process.rank}")
        _, told = self._hear("words", words)
        return "; ".join(_who_says(told))

    @property
    def _is_first_of_copy(self) -> bool:
        """Whether this is the first of the ranks that have the same batches."""
        return self.mesh.process.rank == self.mesh.data_ranks.index(self.mesh.data_rank)

    def _bad_losses(self) -> Found:
        values = [float(total) for total in self.totals]
        return [(index, str(v)) for index, v in enumerate(values) if not math.isfinite(v)]

    def _bad_gradients(self) -> Found:
        """Make every pass again, and look at its gradients before ranks add them up."""
        found: Found = []
        own = [id(each.batch) for each in self.passes if each.counts]
        for index, each in enumerate(self.passes):
            with watched_gradients(self.model) as names:
                self.again(each)
            if each.counts or id(each.batch) not in own:
                found += [(index, name) for name in names]
        return found

    def _of_copy(self, found: Sequence[Found], said: str) -> tuple[str, Sequence[int]]:
        """Say what was found by ranks that have the batches of this one; its first rank speaks."""
        if not self._is_first_of_copy:
            return "", ()
        wrong: dict[int, dict[str, None]] = {}
        for data_rank, of_rank in zip(self.mesh.data_ranks, found, strict=True):
            for index, what in of_rank if data_rank == self.mesh.data_rank else ():
                wrong.setdefault(index, {})[what] = None
        told = [f"{self._named(i)} {said} {_listed([*what])}" for i, what in sorted(wrong.items())]
        return _listed(told), sorted(wrong)

    def _named(self, index: int) -> str:
        batch: object = self.passes[index].batch
        names = list(batch.names) if isinstance(batch, NamesSamples) else []
        word = f"micro-batch {index}" if self.passes[index].counts else "the filler"
        return word + (f" ({_listed(names, _SHOWN_SAMPLES)})" if names else "")

    def _hear(self, what: str, said: Any) -> tuple[list[Any], Mapping[str, list[Any]]]:
        """Say something that JSON can; return what the ranks of this replica say, and of each."""
        told = [json.loads(each) for each in gather_bytes(json.dumps(said).encode())]
        if self.replica_group is None:
            return told, {"": told}
        answer = None
        if self.mesh.process.rank == 0:
            answer = json.dumps(dict(self.replica_group.exchange(what, json.dumps(told)))).encode()
        heard = json.loads(broadcast_bytes(answer))
        return told, {name: json.loads(words) for name, words in heard.items()}


def dump(problem: str, batches: Sequence[object], directory: Path, name: str) -> str:
    """Write batches down, by ``torch.save``, and say where; nothing if there are none.

    A disk that is full or not there costs the file, not the run.

    Args:
        problem: what was wrong with them.
        batches: of one rank.
        directory: where to; other replicas may write there as well.
        name: of the file, without its suffix. One that is there stays: the next is ``name.1.pt``.
    """
    if not batches:
        return ""
    try:
        path = _written({"problem": problem, "batches": tuple(batches)}, directory, name)
    except (OSError, RuntimeError) as error:
        return f"; not written to {directory}: {error}"
    return f"; written to {path}"


def _written(content: Mapping[str, object], directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path, attempt = directory / f"{name}.pt", 0
    while True:
        try:
            with path.open("xb") as stream:
                torch.save(content, stream)
        except FileExistsError:
            attempt += 1
            path = directory / f"{name}.{attempt}.pt"
        else:
            return path


def _any(everybody: Mapping[str, list[Any]]) -> bool:
    return any(said for ranks in everybody.values() for said in ranks)


def _of_sum(names: Sequence[str]) -> str:
    what = f"its sum is not: {_listed(names)}" if names else "its norm is not"
    return f"the gradient of each micro-batch is finite, and {what}"


def _who_says(told: Mapping[str, list[str]]) -> list[str]:
    """Put the name of the speaker before what was said, unless there is only one."""
    is_alone = sum(len(ranks) for ranks in told.values()) == 1
    return [
        words if is_alone else f"rank {rank}{f' of {name}' if name else ''}: {words}"
        for name, ranks in sorted(told.items())
        for rank, words in enumerate(ranks)
        if words
    ]


def _listed(words: Sequence[str], most: int = _SHOWN) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
