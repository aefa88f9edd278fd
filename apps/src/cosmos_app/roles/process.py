"""What every role process does first: find its run and its place among the ranks.

This is where environment variables are read, those that torchrun and the scripts for clusters set,
and written where torch has no other option.
"""

import contextlib
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from cosmos_app.control_files import read_address
from cosmos_app.devices import SHARERS
from cosmos_app.fork_orders import FORKED_AS
from cosmos_app.interfaces import GLOO_INTERFACE, interface_of, on_loopback
from cosmos_app.prepare import RunFiles, run_files
from cosmos_app.recipe import Recipe
from cosmos_core.config import config_from_json
from cosmos_core.rundir import RunDirectory

_ENGINE_CORE = "vllm.v1.engine.core"
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The run that a role process belongs to.

    Attributes:
        run: its directory.
        recipe: what it runs.
        files: its data and model.
        redis_url: its control plane.
        namespace: prefix of its keys there; a resumed run has a new one.
    """

    run: RunDirectory
    recipe: Recipe
    files: RunFiles
    redis_url: str
    namespace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunPlace:
    """This process's place among the ranks of its replica, as torchrun says.

    Attributes:
        rank: global rank.
        local_rank: rank on this host; also the device index.
        world_size: ranks in all.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def torchrun_place() -> TorchrunPlace:
    """Read rank and world size from the environment; one rank when torchrun did not start us."""
    return TorchrunPlace(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )


def num_sharers() -> int:
    """Return how many processes compute on this one's GPU, as the launcher says; 1 without word."""
    return int(os.environ.get(SHARERS, "1"))


def may_fork() -> bool:
    """Whether an engine's processes may be forked from this one, which was forked for that."""
    return os.environ.get(FORKED_AS) == str(os.getpid()) and _ENGINE_CORE in sys.modules


@contextlib.contextmanager
def unwatched_groups() -> Generator[None]:
    """Have NCCL groups that are made inside the block do without torch's watchdog.

    It ends a process one of whose groups lost a member, also where others go on without that. torch
    has no option for it: it looks into the environment when a group is made.
    """
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def own_address() -> str:
    """Return the address that replicas on other machines reach this one by; loopback by default."""
    return os.environ.get("COSMOS_HOST", "127.0.0.1")


def speak_from_own_address() -> None:
    """Have gloo use the interface of the address that was told, unless somebody has chosen one.

    It would take the address of the host name, which on Debian is 127.0.1.1: ranks on other
    machines then try to reach themselves. Where nobody told one it is for the launcher to choose,
    who knows whether all are on this machine.
    """
    name = interface_of(own_address()) if "COSMOS_HOST" in os.environ else ""
    if name:
        os.environ.setdefault(GLOO_INTERFACE, name)


def stay_on_loopback() -> None:
    """Have gloo use loopback in a run that is one replica, if all of its ranks are on this machine.

    Nothing is changed where an address or an interface was told.
    """
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        os.environ.update(on_loopback(os.environ))


def open_context(run_dir: Path, redis_url: str | None) -> RunContext:
    """Read what a role process needs to know of its run, and settle where it speaks from.

    Raises:
        NotARunDirectoryError: if there is no run.
        RunError: if the run was never started.
    """
    speak_from_own_address()
    run = RunDirectory.open(run_dir)
    recipe = config_from_json(Recipe, run.config.read_text())
    written_url, namespace = read_address(run)
    return RunContext(
        run=run,
        recipe=recipe,
        files=run_files(recipe, run.path),
        redis_url=redis_url or written_url,
        namespace=namespace,
    )
