"""Writing to an object store that deletes nothing, as one that may only be added to."""

import contextlib
import os

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem


class AddingFiles(FileSystem):
    """What torch.distributed.checkpoint writes with: an object that is renamed may stay as well.

    Args:
        not_deleted: what the store's driver raises where nothing may be deleted.
    """

    def __init__(self, not_deleted: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self._not_deleted = not_deleted

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Copy an object, and remove the old one if that can be done."""
        assert self.fs is not None
        self.fs.copy(path, new_path)
        with contextlib.suppress(*self._not_deleted):
            self.fs.rm(path)
