"""What a run holds while it stands still: memory of its processes, entries of its keys in Redis."""

import os
from collections import Counter
from pathlib import Path

from real_runs import Run
from redis import Redis

from cosmos_app.control_files import read_address
from cosmos_core.rundir import RunDirectory


def rss_mib(pid: int) -> float:
    """Return the memory of a process that lies in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def stored(run: Run) -> dict[str, int]:
    """Return how many entries or fields each key of a run has, commands of all replicas as one."""
    url, namespace = read_address(RunDirectory.open(run.output))
    found = Counter[str]()
    with Redis.from_url(url) as client:
        for key in client.scan_iter(f"{{{namespace}}}:*"):
            name = key.decode().partition("}:")[2].partition(":")[0]
            match client.type(key):
                case b"stream":
                    found[name] += client.xlen(key)
                case b"hash":
                    found[name] += client.hlen(key)
                case _:
                    pass
    return found
