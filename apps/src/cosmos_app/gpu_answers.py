"""Answers modules that ask, as they are imported, what GPU there is.

torchao asks so. CUDA would start in the process that imports, and does not come through a
fork (https://docs.pytorch.org/docs/stable/notes/multiprocessing.html).
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

_ASKED = ("--query-gpu=name,compute_cap", "--format=csv,noheader")
_DEADLINE_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuAnswer:
    """What is known of a GPU without CUDA; whatever else is asked starts it.

    Attributes:
        name: as CUDA has it.
        major: of its compute capability.
        minor: of its compute capability.
        ask: CUDA's properties.
    """

    name: str
    major: int
    minor: int
    ask: Callable[[], Any]

    def __getattr__(self, name: str) -> Any:
        """Return what CUDA says."""
        return getattr(self.ask(), name)


@contextlib.contextmanager
def answering_for_gpus() -> Generator[None]:
    """Have torch tell the name and capability of GPUs as nvidia-smi does, without starting CUDA.

    Nothing is changed where nvidia-smi is missing, or tells of GPUs that differ.
    """
    found = _all_alike()
    if found is None:
        yield
        return
    name, major, minor = found
    from torch import cuda

    properties: Callable[..., Any] = cuda.get_device_properties
    current = cuda.current_device
    is_answering = True  # modules may keep the functions below

    def answer(device: Any = None) -> Any:
        if not is_answering or cuda.is_initialized():
            return properties(device)
        return GpuAnswer(name=name, major=major, minor=minor, ask=lambda: properties(device))

    def first() -> int:
        return 0 if is_answering and not cuda.is_initialized() else current()

    _set(cuda, get_device_properties=answer, current_device=first)
    try:
        yield
    finally:
        is_answering = False
        _set(cuda, get_device_properties=properties, current_device=current)
        kept = sys.modules.get("torch._dynamo.device_interface")
        getattr(kept, "caching_worker_device_properties", {}).clear()


def _set(module: Any, **functions: Callable[..., Any]) -> None:
    for name, function in functions.items():
        setattr(module, name, function)


def _all_alike() -> tuple[str, int, int] | None:
    """Return name and capability of all GPUs, if they have one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, *_ASKED], capture_output=True, text=True, timeout=_DEADLINE_S, check=True
        )
        (line,) = set(done.stdout.splitlines())
        name, capability = line.rsplit(", ", 1)
        major, minor = capability.split(".")
        return name, int(major), int(minor)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
