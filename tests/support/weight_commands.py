"""The command line of cosmos-weightsync in processes of its own, and a checkpoint for it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import cosmos_weightsync
from cosmos_weightsync import FileSender, FileSenderConfig, shards_of

_SOURCE = Path(cosmos_weightsync.__file__).parents[1]
_ENVIRONMENT: Mapping[str, str] = {
    **os.environ,
    "PYTHONPATH": str(_SOURCE),
    "OMP_NUM_THREADS": "1",
}


def command_line(*arguments: object) -> list[str]:
    """The command line with these arguments, to be started by whatever starts programs."""
    return [sys.executable, "-m", "cosmos_weightsync", *map(str, arguments)]


def start_command(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a program in a session of its own, with both of its outputs to be read."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_ENVIRONMENT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    """Wait for its end with this status, and return what it said on both outputs."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == status, err
    return out, err


def end(process: subprocess.Popen[str]) -> None:
    """Kill it, if it still runs, and let go of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


class Pushed:
    """A ``push --json`` and what it said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        self.said = said
        self.endpoint, self.token = said["endpoint"], said["token"]
        self.process = process


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path; hidden ones left out."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def size_below(root: Path) -> int:
    """What a process that is at work has written so far."""
    total = 0
    for path in root.rglob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # Renamed just now.
            total += path.stat().st_size
    return total


def make_checkpoint(root: Path, seed: int = 7) -> Path:
    """96 MB in several files, with the small files that others keep beside them."""
    generator = torch.Generator().manual_seed(seed)
    layers = {
        f"model.layers.{i}.mlp.{name}_proj.weight": torch.randn(1024, 1024, generator=generator)
        for i in range(8)
        for name in ("gate", "up", "down")
    }
    config = FileSenderConfig(file_bytes=24 << 20)
    FileSender(shards_of(layers.items()), root, config=config).publish(1)
    directory = root / "v00000001"
    (directory / "config.json").write_text('{"hidden_size": 1024}')
    (directory / "tokenizer").mkdir()
    (directory / "tokenizer" / "vocab.txt").write_text("a b c")
    (directory / ".hidden").write_text("stays")
    return directory
