"""How much memory this process can still have, as far as Linux says so."""

import resource
from pathlib import Path

__all__ = ["available_bytes"]

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def available_bytes(meminfo: Path = _MEMINFO, container: Path = _CONTAINER) -> int | None:
    """The least of what the machine has left, its container may have and the process may have.

    Args:
        meminfo: What the kernel tells of the machine.
        container: What it tells of the container's limit.

    Returns:
        ``None`` where nobody says.
    """
    limits = [_machine(meminfo), _container(container), _process()]
    return min((limit for limit in limits if limit is not None), default=None)


def _machine(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _container(container: Path) -> int | None:
    limit = "".join(_lines(container)).strip()
    return int(limit) if limit.isdecimal() else None


def _process() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
