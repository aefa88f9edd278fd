"""Disks that are full, as far as one can have them without being root: by limits on files."""

import contextlib
import resource
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """Have the kernel refuse this process every byte of a file beyond a length.

    A write that begins before it is cut short there, as it is at the end of a disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
