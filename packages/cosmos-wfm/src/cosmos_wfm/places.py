"""Directories that a run will write to, looked at before it does."""

import os
from pathlib import Path

from cosmos_wfm.errors import WfmConfigError


def check_writable(name: str, place: str) -> None:
    """Refuse a directory that could not be made or written to; nothing is made.

    Args:
        name: of the key in the recipe.
        place: directory; an address of a store, or an empty text, is left alone.

    Raises:
        WfmConfigError: says what is in the way.
    """
    if not place or "://" in place:
        return
    path = Path(place).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise WfmConfigError(f"{name}: {place} cannot be a directory, as {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise WfmConfigError(f"{name}: {place} cannot be written, as {there} does not let you")
