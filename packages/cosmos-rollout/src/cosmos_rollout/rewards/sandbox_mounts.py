"""What a generated program sees of the file system: read-only, less what is hidden from it.

Loaded as a file by `sandbox_child`, with the standard library alone, in a process that has just
got a name space of users::

    /                     read-only, without set-id programs
    hidden folders        empty ones of its own in their places: homes, /tmp, /dev, /run
    what it may read      back in its place: Python and its packages, six devices
    its working folder    writable, as the hidden ones are; gone with the last process

All that it writes is in memory, in one file system with a limit.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_NEW_MOUNTS = 0x00020000
_READ_ONLY, _NO_SET_ID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_SET_ATTRIBUTES = 442  # of all architectures; since Linux 5.12
_HERE, _ALL_BELOW = -100, 0x8000
_NOBODY = 65534
_MAX_FILES = 16384
_STREAMS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


class _Attributes(ctypes.Structure):
    """``struct mount_attr`` of Linux."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "users")]


def enclose_files(settings: dict[str, Any], libc: Any) -> bool:
    """Make the file system read-only to this process and what descends from it.

    Args:
        settings: ``hidden`` folders, what is ``readable`` though it lies in one, ``devices`` of
            /dev, ``files_bytes`` for all that is written, the ``program``, which is in the working
            folder, and the effective ``user`` and ``group`` outside of the name space.
        libc: the C library.

    Returns:
        Whether it is. Where not, the kernel gives no such thing, and files are as they were.

    Raises:
        OSError: if the kernel stops half-way.
    """
    program = Path(settings["program"]).read_bytes()
    is_named = _has_mapped_user(settings["user"], settings["group"])
    if not is_named or libc.unshare(_NEW_MOUNTS) != 0 or not _is_read_only(libc):
        return False
    work = os.getcwd()
    outer = os.path.dirname(work)
    temporary = os.path.dirname(outer)  # hidden too: what is mounted there holds the others
    kept = _opened([*settings["devices"], *settings["readable"]])
    room = f"size={settings['files_bytes']},nr_inodes={_MAX_FILES},mode=0700"
    _mount(libc, "tmpfs", temporary, "tmpfs", _NO_SET_ID | _NO_DEVICES, room)
    os.makedirs(work)
    Path(work, settings["program"]).write_bytes(program)
    own = {path: _new(f"{outer}/{i}") for i, path in enumerate(settings["hidden"])}
    kept[temporary] = os.open(temporary, os.O_PATH)
    for path, descriptor in sorted((own | kept).items()):  # a folder before what lies in it
        if path in kept:
            _put_back(libc, path, descriptor)
        elif os.path.isdir(path):
            _bind(libc, path, descriptor)
    for descriptor in (*own.values(), *kept.values()):
        os.close(descriptor)
    if "/dev" in own:
        _fill_dev(libc)
    os.chdir(work)
    return True


def enclose_processes(libc: Any) -> None:
    """Show this process, the first of a name space of processes, those of that name space alone.

    Where others have put mounts into /proc, as containers do, the kernel refuses, and the command
    lines of other processes stay readable. Their environments and memory are not.
    """
    if libc.unshare(_NEW_MOUNTS) == 0:
        flags = _READ_ONLY | _NO_SET_ID | _NO_DEVICES | _NO_PROGRAMS
        with contextlib.suppress(OSError):
            _mount(libc, "proc", "/proc", "proc", flags)


def _has_mapped_user(user: int, group: int) -> bool:
    """Give this process's user a name inside, without which it could make no files there.

    Root is called nobody, so that a program that it starts gains nothing.
    """
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{group or _NOBODY} {group} 1")
        Path("/proc/self/uid_map").write_text(f"{user or _NOBODY} {user} 1")
    except OSError:
        return False
    with contextlib.suppress(OSError):  # in containers that have /proc/sys read-only
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    return True


def _is_read_only(libc: Any) -> bool:
    """Make all that is mounted read-only, here alone; False where the kernel does not do that."""
    if libc.mount(None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None) != 0:
        return False
    wanted = _Attributes(set=_READ_ONLY | _NO_SET_ID)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    flags = ctypes.c_uint(_ALL_BELOW)
    return libc.syscall(_SET_ATTRIBUTES, _HERE, b"/", flags, ctypes.byref(wanted), size) == 0


def _new(path: str) -> int:
    os.mkdir(path)
    return os.open(path, os.O_PATH)


def _opened(paths: Iterable[str]) -> dict[str, int]:
    """Open what is there, by its path and by that without symbolic links."""
    named = {os.path.abspath(path) for path in paths}
    real = {os.path.realpath(path) for path in named}
    return {path: os.open(path, os.O_PATH) for path in named | real if os.path.exists(path)}


def _put_back(libc: Any, path: str, descriptor: int) -> None:
    """Show again what is hidden by one of the program's own folders; nothing if it is not."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
    _bind(libc, path, descriptor)


def _fill_dev(libc: Any) -> None:
    """Make what programs expect in /dev beside devices: shared memory, streams, terminals."""
    for name in ("shm", "pts"):
        os.makedirs(f"/dev/{name}", exist_ok=True)  # temporary folders may lie in the former
    for name, target in _STREAMS.items():
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")
    with contextlib.suppress(OSError):
        flags = _NO_SET_ID | _NO_PROGRAMS
        _mount(libc, "devpts", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666")
        os.symlink("pts/ptmx", "/dev/ptmx")


def _bind(libc: Any, path: str, descriptor: int) -> None:
    _mount(libc, f"/proc/self/fd/{descriptor}", path, None, _BIND | _RECURSIVE)


def _mount(
    libc: Any, source: str, path: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    words = (None if word is None else os.fsencode(word) for word in (source, path, kind, options))
    source_, path_, kind_, options_ = words
    if libc.mount(source_, path_, kind_, ctypes.c_ulong(flags), options_) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount: {os.strerror(number)}", path)
