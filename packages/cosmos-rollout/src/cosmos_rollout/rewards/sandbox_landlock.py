"""The second best for a generated program's file system: rules, where no mounts are to be had.

Loaded as a file by `sandbox_child`, with the standard library alone. Containers as a rule allow no
name spaces of users, but do allow Landlock (Linux 5.13): a process gives up what it may do with
files, for itself and all that it starts. It cannot be given folders of its own in the places of
others, so that what is hidden is refused; shared memory stays that of all, because semaphores are
made there. Source: https://docs.kernel.org/userspace-api/landlock.html.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # of all architectures
_VERSION_PLEASE, _FILES_BELOW = 1, 1
_RUN, _WRITE, _READ, _LIST, _TRUNCATE, _DEVICE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_OF_FILES = _RUN | _WRITE | _READ | _TRUNCATE | _DEVICE
_KNOWN = (13, 14, 15, 15, 16)
"""How many rights over files each version knows, from the first; later ones know no more."""
_SINCE_NETWORK, _SINCE_SCOPES = 4, 6
_MANY = 1000


class _Ruleset(ctypes.Structure):
    """``struct landlock_ruleset_attr`` of Linux."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scopes")]


class _Below(ctypes.Structure):
    """``struct landlock_path_beneath_attr`` of Linux."""

    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def has_rules(libc: Any) -> bool:
    """Tell whether this kernel has Landlock."""
    return libc.syscall(_CREATE, None, 0, _VERSION_PLEASE) >= 1


def refuse_files(settings: dict[str, Any], libc: Any) -> None:
    """Let this process, and what descends from it, write into its working folder alone.

    Where the kernel is new enough it also refuses TCP, truncating by name, and signals to others.
    Times, owners and modes of files are not refused.

    Args:
        settings: ``hidden`` folders, what is ``readable`` though it lies in one, and ``devices``
            to write to.
        libc: the C library; this process has no new privileges to gain.

    Raises:
        OSError: if the kernel has the rules and does not take them.
    """
    version = libc.syscall(_CREATE, None, 0, _VERSION_PLEASE)
    all_rights = (1 << _KNOWN[min(version, len(_KNOWN)) - 1]) - 1
    wanted = _Ruleset(
        files=all_rights,
        network=3 if version >= _SINCE_NETWORK else 0,
        scopes=3 if version >= _SINCE_SCOPES else 0,
    )
    rules = libc.syscall(_CREATE, ctypes.byref(wanted), ctypes.sizeof(wanted), 0)
    work = os.getcwd()
    places = dict.fromkeys(settings["hidden"], False)
    places |= {os.path.realpath(path): True for path in settings["readable"]}
    for path in shown_paths("/", places):
        _allow(libc, rules, path, _RUN | _READ | _LIST)
    streams = [f"/proc/self/fd/{stream}" for stream in range(3)]
    for path in (*settings["devices"], *streams, "/dev/shm", work):
        _allow(libc, rules, path, all_rights)
    if libc.syscall(_RESTRICT, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock takes no rules")
    os.close(rules)


def shown_paths(folder: str, places: dict[str, bool], is_shown: bool = True) -> Iterator[str]:
    """Yield paths that, with all below them, make up what is shown of a folder.

    Args:
        folder: where to look.
        places: paths from which on all is shown, or all is hidden.
        is_shown: what holds for the folder if no place says otherwise.
    """
    is_shown = places.get(folder, is_shown)
    inside = f"{folder.rstrip('/')}/"
    below = {path for path in places if path.startswith(inside)}
    if all(places[path] == is_shown for path in below):
        if is_shown:
            yield folder
        return
    names = {path[len(inside) :].split("/")[0] for path in below}
    if is_shown:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            found = {entry.name for entry in entries if not entry.is_symlink()}
            names |= found if len(found) <= _MANY else set()
    for name in names:
        yield from shown_paths(inside + name, places, is_shown)


def _allow(libc: Any, rules: int, path: str, rights: int) -> None:
    """Allow something below a path; of a file what files have, of what is not there nothing."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            rights &= _OF_FILES
        below = _Below(rights=rights, folder=descriptor)
        libc.syscall(_ADD, rules, _FILES_BELOW, ctypes.byref(below), 0)
        os.close(descriptor)
