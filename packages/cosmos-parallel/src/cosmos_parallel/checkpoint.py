"""Checkpoints of a learner: reshardable, written in the background, whole or not at all.

step-00000010/            appears at one instant, when everything in it is durable
  __0_0.distcp ...        torch.distributed.checkpoint: model (without what adapters are added to),
                          optimizer, RNG of each rank
  .metadata
  extra.bin               opaque bytes of the caller, such as the controller's cut
  manifest.json           step, ranks, score, its number in the order of saves, and the length and
                          CRC-32 of every other file
"""

import json
import operator
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from cosmos_parallel.agreement import Agreement
from cosmos_parallel.checkpoint_files import MANIFEST, FileSum, open_files, parse_manifest
from cosmos_parallel.errors import (
    CheckpointError,
    CheckpointRefusedError,
    CheckpointWriteError,
)
from cosmos_parallel.frozen_base import base_sums, check_base, frozen_base
from cosmos_parallel.learner import Learner
from cosmos_parallel.learner_state import restore, saved_sums, state_to_fill, state_to_save
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.retention import RetentionConfig
from cosmos_parallel.storage import State, read_state, write_state

FORMAT = 1
_EXTRA = "extra.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What came with a checkpoint besides the learner's own state.

    Attributes:
        step: the step it was saved after.
        extra: the caller's bytes.
        path: where it is: a directory or a URL.
        score: what it was saved with, such as a validation loss.
    """

    step: int
    extra: bytes
    path: str
    score: float | None = None


class CheckpointStore:
    """The checkpoints of one run, in one directory or object store that all ranks see.

    Every method but ``steps``, ``latest``, ``in_order``, ``best``, ``extra`` and ``path`` is called
    by all ranks, in the same order.
    One save runs at a time, in a thread of its own with a process group of its own.
    """

    def __init__(
        self,
        place: Path | str,
        mesh: TrainingMesh,
        *,
        retention: RetentionConfig | None = None,
        before_it_appears: Callable[[bytes], None] = lambda _: None,
        while_writing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Open the place; a directory is made if it is not there.

        Args:
            place: a directory, or a URL that fsspec knows, such as ``s3://bucket/run``; other
                files in it are left alone.
            mesh: the ranks that save and load.
            retention: what stays after each save; the two newest when ``None``.
            before_it_appears: called on the writer with the caller's bytes once all is written; a
                ``CheckpointRefusedError`` that it raises is that of the save, and nothing appears.
            while_writing: what each save is written inside of, on every rank and in the thread
                that writes: it may end a process that does for too long.

        Raises:
            CheckpointError: if the place cannot be opened or made.
        """
        self._place = place
        self._mesh = mesh
        self._retention = retention or RetentionConfig()
        self._before_it_appears = before_it_appears
        self._while_writing = while_writing
        self._is_writer = mesh.process.rank == 0
        self._ranks = Agreement(place, mesh)
        # nobody looks before the writer has put things right
        self._files = self._ranks.on_all(lambda: open_files(place, is_writer=self._is_writer))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[str] | None = None
        self._sums: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def path(self, step: int) -> str:
        """Return where the checkpoint of ``step`` is, or would be."""
        return self._files.path(step)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        return self._files.steps()

    def latest(self) -> int | None:
        """Return the step of the complete checkpoint that was saved last.

        Where a run has gone back to an older one, steps that it left behind may be higher.

        Raises:
            CheckpointError: if a manifest is damaged.
        """
        return next(reversed(self.in_order()), None)

    def latest_of_all(self) -> int | None:
        """Return what rank 0 finds to be `latest`, on every rank; every rank calls.

        Raises:
            CheckpointError: on every rank, if a manifest is damaged.
        """
        return self._ranks.as_first(self.latest)

    def in_order(self) -> list[int]:
        """Return the steps of complete checkpoints in the order in which they were saved.

        Raises:
            CheckpointError: if a manifest is damaged.
        """
        return _as_saved(self._manifests())

    def best(self) -> int | None:
        """Return the step with the best score; ``None`` if none was saved with one.

        Raises:
            CheckpointError: if a manifest is damaged.
        """
        ranked = self._retention.ranked(_scores(self._manifests()))
        return ranked[0] if ranked else None

    def extra(self, step: int) -> bytes:
        """Return the caller's bytes of a complete checkpoint, without loading anything else.

        Raises:
            CheckpointError: if there is no such checkpoint.
        """
        try:
            return self._files.read(self.path(step), _EXTRA)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {self.path(step)} cannot be read: {error}"
            ) from error

    def save(
        self, step: int, learner: Learner, extra: bytes = b"", *, score: float | None = None
    ) -> str:
        """Write a checkpoint and return its path when it is durable.

        Raises:
            CheckpointWriteError: if it, or a save still going on, could not be written.
        """
        self.start_save(step, learner, extra, score=score)
        path = self.wait()
        assert path is not None
        return path

    def start_save(
        self, step: int, learner: Learner, extra: bytes = b"", *, score: float | None = None
    ) -> None:
        """Copy the learner's state to host memory and write it in the background.

        Training may go on at once. A save still going on is waited for first.

        Args:
            step: the step just taken.
            learner: what is saved.
            extra: bytes of the caller.
            score: how good it is, for retention and ``best``.

        Raises:
            CheckpointWriteError: if the save before could not be written; called again, it begins
                this one.
            CheckpointError: if the step is below 0, or ``extra`` is not bytes.
        """
        given, step = cast("object", extra), operator.index(step)  # of NumPy and torch too
        if step < 0 or not isinstance(given, bytes):
            raise CheckpointError(
                f"checkpoint of step {step} with extra of type {type(given).__name__}: steps count "
                "from 0, and extra is bytes: text.encode(), or json.dumps(...).encode()"
            )
        self.wait()
        # staged tensors live in buffers that the stager uses again, hence one save at a time
        state = state_to_save(learner, self._mesh.process, self._base_sums(learner))
        staged = self._stager.stage(state)
        assert not isinstance(staged, Future)
        self._saving = self._thread.submit(self._write, step, staged, extra, score)

    def wait(self) -> str | None:
        """Wait for the save going on and return its path, or ``None`` if there is none.

        Raises:
            CheckpointWriteError: if it could not be written, on every rank; the checkpoints before
                it are untouched, and what was written of it is removed.
        """
        saving, self._saving = self._saving, None
        return saving.result() if saving else None

    def is_saving(self) -> bool:
        """Return whether a save is still being written."""
        return self._saving is not None and not self._saving.done()

    def load(self, learner: Learner, step: int | None = None) -> Checkpoint:
        """Restore a learner in place, on any number of ranks.

        Args:
            learner: of the same model; its weights, optimizer, schedule and RNG are replaced.
            step: which checkpoint, as rank 0 says; the one saved last when ``None``.

        Raises:
            CheckpointError: on every rank, if it is missing, damaged, or of another model. The
                learner may then be partly restored and must not be used.
        """
        self.wait()
        step = self._ranks.as_first(lambda: self.latest() if step is None else step)
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self._place}")
        path, manifest, extra = self._ranks.on_all(lambda: self._verified(step))
        state = self._ranks.on_all(lambda: self._state_to_fill(learner, path))
        try:
            read_state(state, self._files.reader(path), self._ranks.group)
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        self._sums.pop(learner.model, None)
        if saved := saved_sums(state):
            check_base(self._base_sums(learner), saved, path)
        restore(learner, self._mesh.process, state)
        return Checkpoint(step=step, extra=extra, path=path, score=manifest.get("score"))

    def _base_sums(self, learner: Learner) -> dict[str, Tensor]:
        """Return the sums of what adapters are added to, taken once; every rank calls."""
        model = learner.model
        if model not in self._sums:
            self._sums[model] = base_sums(frozen_base(model), self._mesh)
        return self._sums[model]

    def close(self) -> None:
        """Wait for the save going on and stop the thread; may be called twice.

        Raises:
            CheckpointWriteError: if that save could not be written.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, state: State, extra: bytes, score: float | None) -> str:
        with self._while_writing():
            return self._write_whole(step, state, extra, score)

    def _write_whole(self, step: int, state: State, extra: bytes, score: float | None) -> str:
        writing = ""
        try:
            # all have named the place before the writer changes anything
            writing = self._ranks.on_all(lambda: self._files.next_path(step))
            self._ranks.on_all(lambda: self._files.prepare(writing) if self._is_writer else None)
            write_state(state, self._files.writer(writing), self._ranks.group)
            self._ranks.on_all(lambda: self._write_sums(writing))
            self._ranks.on_all(lambda: self._finish(step, writing, extra, score))
        except Exception as error:
            if self._is_writer and writing:
                self._files.abandon(writing)
            if isinstance(error, CheckpointRefusedError):
                raise
            raise CheckpointWriteError(
                f"checkpoint {self.path(step)} not written: {error}"
            ) from error
        return self.path(step)

    def _write_sums(self, writing: str) -> None:
        rank = self._mesh.process.rank
        names = [name for name in self._files.names(writing) if name.startswith(f"__{rank}_")]
        sums = {name: self._files.sum_of(writing, name) for name in names}
        self._files.write(writing, f"sums-{rank}.json", json.dumps(sums).encode())

    def _finish(self, step: int, writing: str, extra: bytes, score: float | None) -> None:
        if not self._is_writer:
            return
        self._files.write(writing, _EXTRA, extra)
        sums: dict[str, FileSum] = {
            name: self._files.sum_of(writing, name) for name in (_EXTRA, ".metadata")
        }
        for name in self._files.names(writing):
            if name.startswith("sums-"):
                sums |= json.loads(self._files.read(writing, name))
                self._files.discard(writing, name)
        self._before_it_appears(extra)
        manifests = self._manifests()
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "order": 1 + max(map(_order, manifests.values()), default=0),
            "score": None if score is None else float(score),
            "num_ranks": self._mesh.process.world_size,
            "files": sums,
        }
        self._files.publish(writing, step, json.dumps(manifest, indent=1).encode())
        manifests[step] = manifest
        for old in self._retention.doomed(_as_saved(manifests), _scores(manifests)):
            self._files.remove(old)

    def _manifests(self) -> dict[int, dict[str, Any]]:
        manifests: dict[int, dict[str, Any]] = {}
        for step in self.steps():
            try:
                manifests[step] = self._manifest(self.path(step))
            except CheckpointError:
                if step in self.steps():  # or else another process has just removed it
                    raise
        return manifests

    def _manifest(self, path: str) -> dict[str, Any]:
        try:
            data = self._files.read(path, MANIFEST)
        except FileNotFoundError as error:
            there = bool(self._files.names(path))
            what = f"has no {MANIFEST}" if there else "does not exist"
            raise CheckpointError(f"checkpoint {path} {what}") from error
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        return parse_manifest(data, path, FORMAT)

    def _verified(self, step: int) -> tuple[str, dict[str, Any], bytes]:
        """Return where a checkpoint is, its manifest and the caller's bytes."""
        path = self.path(step)
        manifest = self._manifest(path)
        self._verify(path, manifest)
        return path, manifest, self.extra(step)

    def _state_to_fill(self, learner: Learner, path: str) -> State:
        try:
            saved = self._files.reader(path).read_metadata().state_dict_metadata
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        return state_to_fill(learner, self._mesh.process, saved, path)

    def _verify(self, path: str, manifest: dict[str, Any]) -> None:
        process = self._mesh.process
        there = set(self._files.names(path))
        for name in sorted(manifest["files"])[process.rank :: process.world_size]:
            length, crc = manifest["files"][name]
            if name not in there:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
            found_length, found_crc = self._files.sum_of(path, name)
            if found_length != length:
                raise CheckpointError(
                    f"checkpoint {path} is damaged: {name} has {found_length} bytes, not {length}"
                )
            if found_crc != crc:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} has other content")


def _order(manifest: dict[str, Any]) -> int:
    """Return a save's number, 0 for those of earlier versions: these go by their steps."""
    return int(manifest.get("order", 0))


def _as_saved(manifests: dict[int, dict[str, Any]]) -> list[int]:
    """Return steps in the order their checkpoints were saved in."""
    return sorted(manifests, key=lambda step: (_order(manifests[step]), step))


def _scores(manifests: dict[int, dict[str, Any]]) -> dict[int, float]:
    scores = {step: manifest.get("score") for step, manifest in manifests.items()}
    return {step: score for step, score in scores.items() if score is not None}
