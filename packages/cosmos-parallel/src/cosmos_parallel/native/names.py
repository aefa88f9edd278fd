"""Between torchtitan's names of tensors and those of Hugging Face checkpoints."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

CARRIED = "carried"  # the module that has what is not computed with, under Hugging Face's names


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors of torchtitan's that files have as one.

    Attributes:
        parts: torchtitan's names, with ``{}`` for the layer.
        dim: along which one follows the other.
    """

    parts: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class HfNames:
    """How the tensors of a family are called in files, and how they lie there.

    A matrix of an expert has two numbers in Hugging Face's name, its layer and itself, where
    torchtitan has the experts of a layer in one tensor, of which they are the leading index.

    Attributes:
        native: torchtitan's name of every Hugging Face name, with ``{}`` for numbers.
        transposed: Hugging Face names of what files have with its last two dims exchanged.
        carried: how Hugging Face names of what is not computed with begin.
        joined: Hugging Face names of what is several tensors here.
    """

    native: Mapping[str, str]
    transposed: frozenset[str] = frozenset()
    carried: tuple[str, ...] = ()
    joined: Mapping[str, Joined] = field(default_factory=dict[str, Joined])

    def as_in(self, names: Iterable[str]) -> "HfNames":
        """Return these names, of those that mean the same the one that files have.

        Args:
            names: of all tensors of a checkpoint.
        """
        found = {_abstract(name)[0] for name in names}
        covered = {ours for theirs, ours in self.native.items() if theirs in found}
        for theirs, joined in self.joined.items():
            covered |= set(joined.parts) if theirs in found else set()
        return replace(
            self,
            native={t: o for t, o in self.native.items() if t in found or o not in covered},
            joined={
                theirs: joined
                for theirs, joined in self.joined.items()
                if theirs in found or not covered.issuperset(joined.parts)
            },
        )

    def to_hf(self, tensors: Mapping[str, Any], *, leaving: frozenset[str]) -> dict[str, Any]:
        """Rename tensors; experts become views of their own matrices.

        Args:
            tensors: by torchtitan's names, whole or on the meta device; of what files have
                joined, all parts or none.
            leaving: Hugging Face names of what no file has.
        """
        theirs_of = {native: theirs for theirs, native in self.native.items()}
        renamed: dict[str, Any] = {}
        for name, value in tensors.items():
            if name.startswith(f"{CARRIED}."):
                renamed[name.removeprefix(f"{CARRIED}.")] = value
                continue
            pattern, numbers = _abstract(name)
            whole = self._joined_of(pattern)
            if whole is not None:
                parts = [part.format(*numbers) for part in self.joined[whole].parts]
                if name == parts[0]:
                    joined = torch.cat([tensors[part] for part in parts], self.joined[whole].dim)
                    renamed[whole.format(*numbers)] = joined
                continue
            theirs = theirs_of.get(pattern)
            if theirs is None or theirs in leaving:
                continue
            stored = value.transpose(-2, -1) if theirs in self.transposed else value
            if theirs.count("{}") == len(numbers):
                renamed[theirs.format(*numbers)] = stored
            else:
                for expert, matrix in enumerate(stored.unbind(0)):
                    renamed[theirs.format(*numbers, expert)] = matrix
        return renamed

    def is_transposed(self, name: str) -> bool:
        """Whether files have the tensor that torchtitan calls so with its last dims exchanged."""
        pattern, _ = _abstract(name)
        return pattern in {self.native[theirs] for theirs in self.transposed}

    def joined_with(self, name: str) -> Joined:
        """Return what files have joined with the tensor that torchtitan calls so; it too, or alone.

        Returns:
            Names with numbers in them, in the order of files.
        """
        pattern, numbers = _abstract(name)
        whole = self._joined_of(pattern)
        if whole is None:
            return Joined((name,), dim=0)
        found = self.joined[whole]
        return Joined(tuple(part.format(*numbers) for part in found.parts), found.dim)

    def _joined_of(self, pattern: str) -> str | None:
        found = (theirs for theirs, joined in self.joined.items() if pattern in joined.parts)
        return next(found, None)


def carried_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return what this rank keeps of a checkpoint and computes nothing with, by state-dict names.

    It is buffers, so whoever sends parameters has to name it; ``model.to_hf`` renames it.
    """
    return [each for each in model.named_buffers() if each[0].startswith(f"{CARRIED}.")]


def _abstract(name: str) -> tuple[str, list[str]]:
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return ".".join("{}" if part.isdigit() else part for part in parts), numbers
