"""Files of tensors that others may read, as far as the user's umask lets them."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_NUMBER = re.compile(r"\(os error (\d+)\)")


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with the permissions of any other new file.

    safetensors 0.8 leaves files for their owner alone: a model beside readable configs, which
    another account could not serve.

    Args:
        tensors: by name, on the CPU.
        path: the file; it may be there.
        metadata: of its header.

    Raises:
        OSError: if it cannot be written.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        raise _as_os_error(error, path) from error
    _set_mode([path], path.parent)


def share_tensor_files(directory: Path) -> None:
    """Give safetensors files that a library wrote the permissions of any other new file.

    Args:
        directory: that holds them, in folders too.

    Raises:
        OSError: if it cannot be written to.
    """
    _set_mode(sorted(directory.rglob("*.safetensors")), directory)


def _as_os_error(error: SafetensorError, path: Path) -> OSError:
    """Return what the system said, which safetensors has in its text alone: a full disk, say."""
    number = _NUMBER.search(str(error))
    if number is None:
        return OSError(f"{path}: {error}")
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def _set_mode(files: Sequence[Path], directory: Path) -> None:
    probe = directory / f".mode-{uuid4().hex}"
    descriptor = os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()
    for path in files:
        with contextlib.suppress(OSError):  # file systems without permissions
            path.chmod(mode)
