"""Where vLLM has its sockets, whose files it leaves behind when it ends."""

import contextlib
import os
import tempfile
from collections.abc import Generator

_PLACE = "VLLM_RPC_BASE_PATH"
_LONGEST = 107 - 1 - 36
"""A socket's path may have 107 bytes, and vLLM calls each by a number of 36."""


@contextlib.contextmanager
def own_sockets() -> Generator[None]:
    """Have vLLM, in this process and those it starts, use a folder that goes in the end.

    Under a path too long for that, it uses what it would have used.
    """
    before = os.environ.get(_PLACE)
    with tempfile.TemporaryDirectory(
        prefix="vllm-", dir=before or None, ignore_cleanup_errors=True
    ) as folder:
        if len(os.fsencode(folder)) > _LONGEST:
            yield
            return
        os.environ[_PLACE] = folder
        try:
            yield
        finally:
            del os.environ[_PLACE]
            if before is not None:
                os.environ[_PLACE] = before
