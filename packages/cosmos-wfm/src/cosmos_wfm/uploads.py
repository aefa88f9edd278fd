"""Saves that go to an object store as well: every file, then a list of them, which is written last.

<url>/step_<N>/...              what <output>/safetensors/step_<N> holds
<url>/step_<N>/uploaded.json    {"model_index.json": 612, ...}: with it the save is whole
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class

from cosmos_wfm.errors import UploadError, WfmConfigError

UPLOADED = "uploaded.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadConfig:
    """Where saves go beside the run directory.

    Attributes:
        url: prefix of an object store, such as ``s3://bucket/runs/7``; whatever fsspec knows.
        saves: ``all`` of them, or the one at the end (``final``).
    """

    url: str
    saves: Literal["all", "final"] = "all"

    def __post_init__(self) -> None:
        """Refuse no address, which would be the root of this machine's files.

        Raises:
            WfmConfigError: if it is empty.
        """
        if not self.url.strip("/"):
            raise WfmConfigError(f"upload: url is {self.url!r}; it must be a prefix of a store")


def check_upload(config: UploadConfig | None) -> None:
    """Refuse an address that no driver is installed for; nobody is asked.

    Raises:
        WfmConfigError: if there is none.
    """
    if config is None or "://" not in config.url:
        return
    try:
        get_filesystem_class(config.url.partition("://")[0])
    except (ImportError, ValueError) as error:
        raise WfmConfigError(f"upload: url is {config.url}: {error}") from error


def upload_directory(directory: Path, url: str) -> int:
    """Copy a directory to a prefix and write ``uploaded.json`` there last.

    What an earlier upload left there is removed before, its ``uploaded.json`` first.

    Args:
        directory: local, complete.
        url: of the prefix.

    Returns:
        Bytes that were copied.

    Raises:
        UploadError: if there is no driver for the address, or the store refuses or loses a file.
    """
    names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
    sizes = {name: (directory / name).stat().st_size for name in names}
    try:
        # Any: fsspec's stubs leave most of a file system open
        files, root = cast("tuple[Any, str]", url_to_fs(url.rstrip("/")))
        if files.exists(f"{root}/{UPLOADED}"):
            files.rm_file(f"{root}/{UPLOADED}")
        if files.exists(root):
            files.rm(root, recursive=True)
        for name, size in sizes.items():
            files.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            files.put_file(str(directory / name), f"{root}/{name}")
            found = files.size(f"{root}/{name}")
            if found != size:
                raise UploadError(f"{url}/{name} has {found} bytes; {size} were sent")
        files.pipe_file(f"{root}/{UPLOADED}", json.dumps(sizes, indent=1).encode())
    except (OSError, ImportError, ValueError) as error:
        raise UploadError(f"{directory} cannot be uploaded to {url}: {error}") from error
    return sum(sizes.values())
