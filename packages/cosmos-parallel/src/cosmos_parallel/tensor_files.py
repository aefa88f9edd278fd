"""Files of tensors that others may read, as far as the user's umask lets them."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


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
    save_file(dict(tensors), path, metadata=dict(metadata))
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()
    with contextlib.suppress(OSError):  # file systems without permissions
        path.chmod(mode)
