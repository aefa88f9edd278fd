"""Checkpoints of a learner: reshardable, written in the background, whole or not at all.

step-00000010/            appears by one rename, when everything in it is on the disk
  __0_0.distcp ...        torch.distributed.checkpoint: model, optimizer, RNG of each rank
  .metadata
  extra.bin               opaque bytes of the caller, such as the controller's cut
  manifest.json           step, ranks, and the length and CRC-32 of every other file
.writing-00000020/        a save that is going on, or one that was killed
.replaced-00000010/       the earlier save of a step that is saved again
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from cosmos_parallel.errors import CheckpointError
from cosmos_parallel.learner import Learner
from cosmos_parallel.learner_state import restore, state_of, state_to_fill
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.storage import State, read_state, write_state

FORMAT = 1
_MANIFEST = "manifest.json"
_EXTRA = "extra.bin"
_STEP_NAME = re.compile(r"step-(\d{8})")
_READ_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What came with a checkpoint besides the learner's own state.

    Attributes:
        step: the step it was saved after.
        extra: the caller's bytes.
        path: where it is.
    """

    step: int
    extra: bytes
    path: Path


class CheckpointStore:
    """The checkpoints of one run, in one directory that all ranks see.

    Every method but ``steps``, ``latest``, ``extra`` and ``path`` is called by all ranks, in the
    same order.
    One save runs at a time, in a thread of its own with a process group of its own.
    """

    def __init__(self, directory: Path, mesh: TrainingMesh, *, keep: int = 2) -> None:
        """Open the directory, which is made if it is not there.

        Args:
            directory: where checkpoints are; other files in it are left alone.
            mesh: the ranks that save and load.
            keep: how many of the newest stay; older ones are removed after each save.

        Raises:
            CheckpointError: if ``keep`` is below 1 or the directory cannot be made.
        """
        if keep < 1:
            raise CheckpointError(f"keep is {keep}; at least 1 checkpoint must stay")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot make checkpoint directory {directory}: {error}"
            ) from error
        self._directory = directory
        self._mesh = mesh
        self._keep = keep
        self._is_writer = mesh.process.rank == 0
        self._group = _private_group() if mesh.is_distributed else None
        self._agree(self._put_back_replaced)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[Path] | None = None
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def path(self, step: int) -> Path:
        """Return where the checkpoint of ``step`` is, or would be."""
        return self._directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        names = (_STEP_NAME.fullmatch(entry.name) for entry in self._directory.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def extra(self, step: int) -> bytes:
        """Return the caller's bytes of a complete checkpoint, without loading anything else.

        Raises:
            CheckpointError: if there is no such checkpoint.
        """
        try:
            return (self.path(step) / _EXTRA).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {self.path(step)} cannot be read: {error}"
            ) from error

    def save(self, step: int, learner: Learner, extra: bytes = b"") -> Path:
        """Write a checkpoint and return its path when it is durable.

        Raises:
            CheckpointError: if it, or a save still going on, could not be written.
        """
        self.start_save(step, learner, extra)
        path = self.wait()
        assert path is not None
        return path

    def start_save(self, step: int, learner: Learner, extra: bytes = b"") -> None:
        """Copy the learner's state to host memory and write it in the background.

        Training may go on at once. A save still going on is waited for first.

        Raises:
            CheckpointError: if the save before could not be written.
        """
        self.wait()
        # staged tensors live in buffers that the stager uses again, hence one save at a time
        staged = self._stager.stage(state_of(learner, self._mesh.process))
        assert not isinstance(staged, Future)
        self._saving = self._thread.submit(self._write, step, staged, extra)

    def wait(self) -> Path | None:
        """Wait for the save going on and return its path, or ``None`` if there is none.

        Raises:
            CheckpointError: if it could not be written; the checkpoints before it are untouched.
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
            step: which checkpoint; the newest when ``None``.

        Raises:
            CheckpointError: if it is missing, damaged, or of another model. The learner may then
                be partly restored and must not be used.
        """
        self.wait()
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"there is no checkpoint in {self._directory}")
        path = self.path(step)
        manifest = _read_manifest(path)
        self._agree(lambda: self._verify(path, manifest))
        state = state_to_fill(learner, self._mesh.process, path)
        try:
            read_state(state, path, self._group)
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
        restore(learner, self._mesh.process, state)
        return Checkpoint(step=step, extra=(path / _EXTRA).read_bytes(), path=path)

    def close(self) -> None:
        """Wait for the save going on and stop the thread; may be called twice.

        Raises:
            CheckpointError: if that save could not be written.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, state: State, extra: bytes) -> Path:
        writing = self._directory / f".writing-{step:08d}"
        self._agree(lambda: self._prepare(writing))
        try:
            write_state(state, writing, self._group)
        except Exception as error:
            raise CheckpointError(f"checkpoint {self.path(step)} not written: {error}") from error
        self._agree(lambda: self._write_sums(writing))
        self._agree(lambda: self._finish(step, writing, extra))
        return self.path(step)

    def _put_back_replaced(self) -> None:
        if self._is_writer:
            for replaced in self._directory.glob(".replaced-*"):
                final = self.path(int(replaced.name.rpartition("-")[2]))
                if final.exists():
                    shutil.rmtree(replaced)
                else:
                    replaced.rename(final)

    def _prepare(self, writing: Path) -> None:
        if self._is_writer:
            for stale in self._directory.glob(".writing-*"):
                shutil.rmtree(stale)
            writing.mkdir()

    def _write_sums(self, writing: Path) -> None:
        rank = self._mesh.process.rank
        sums = {file.name: _sum_of(file) for file in writing.glob(f"__{rank}_*.distcp")}
        _write_durably(writing / f"sums-{rank}.json", json.dumps(sums).encode())

    def _finish(self, step: int, writing: Path, extra: bytes) -> None:
        if not self._is_writer:
            return
        _write_durably(writing / _EXTRA, extra)
        files: dict[str, list[int]] = {
            name: _sum_of(writing / name) for name in (_EXTRA, ".metadata")
        }
        for sums in writing.glob("sums-*.json"):
            files |= json.loads(sums.read_text())
            sums.unlink()
        manifest = {
            "format": FORMAT,
            "step": step,
            "num_ranks": self._mesh.process.world_size,
            "files": files,
        }
        _write_durably(writing / _MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_directory(writing)
        final, replaced = self.path(step), self._directory / f".replaced-{step:08d}"
        if final.exists():
            final.rename(replaced)
        writing.rename(final)
        _sync_directory(self._directory)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old))

    def _verify(self, path: Path, manifest: dict[str, Any]) -> None:
        process = self._mesh.process
        for name in sorted(manifest["files"])[process.rank :: process.world_size]:
            length, crc = manifest["files"][name]
            if not (path / name).is_file():
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
            found_length, found_crc = _sum_of(path / name)
            if found_length != length:
                raise CheckpointError(
                    f"checkpoint {path} is damaged: {name} has {found_length} bytes, not {length}"
                )
            if found_crc != crc:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} has other content")

    def _agree(self, action: Callable[[], None]) -> None:
        """Do ``action`` on every rank; if it failed on one, fail on all."""
        failure: Exception | None = None
        try:
            action()
        except (OSError, CheckpointError) as error:
            failure = error
        if self._group is not None:
            failed = torch.tensor(int(failure is not None))
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
            if failed and failure is None:
                raise CheckpointError(f"another rank could not use {self._directory}; see its log")
        if isinstance(failure, CheckpointError):
            raise failure
        if failure is not None:
            raise CheckpointError(f"checkpoints in {self._directory}: {failure}") from failure


def _private_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
    except FileNotFoundError as error:
        what = f"has no {_MANIFEST}" if path.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {what}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {_MANIFEST}: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} has format {manifest.get('format')}; this version reads {FORMAT}"
        )
    return manifest


def _sum_of(file: Path) -> list[int]:
    length = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            length += len(block)
            crc = zlib.crc32(block, crc)
    return [length, crc]


def _write_durably(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
