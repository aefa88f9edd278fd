"""What tests may be skipped for: what a machine may lack, and how it is had.

All skips go through `needs`, `skip_without` or `pytest.importorskip`, so that each has one of the
names below. ``--require all`` makes failures of those that no machine needs to have: CI does, where
a browser that could not be installed would otherwise be a dashboard that nobody has opened.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import pytest


@dataclass(frozen=True, slots=True)
class Capability:
    """What a machine may lack.

    Attributes:
        wanted: what is waited for.
        remedy: what gives it, or who else runs what waits for it.
        in_all: whether ``--require all`` requires it. What takes other hardware, or what one
            environment cannot have beside the rest, is required by its name alone.
    """

    wanted: str
    remedy: str
    in_all: bool = True


_SYSTEM = "a machine, or a container, whose kernel gives them"
CAPABILITIES = {
    "packages": Capability("what the workspace installs", "make setup"),
    "torchvision": Capability("torchvision beside the environment", "make setup"),
    "nixl": Capability("NIXL, which is there for Linux on x86-64", "make setup"),
    "triton": Capability("Triton, which is there for Linux", "make setup"),
    "compiler": Capability(
        "a C++ compiler and Python's headers", "apt-get install g++ python3-dev; make setup"
    ),
    "browser": Capability("Chromium and its driver", "scripts/install_browser.sh"),
    "sglang": Capability(
        "a Python that has SGLang",
        "export COSMOS_SGLANG_PYTHON=$(scripts/sglang_environment.sh)",
    ),
    "swift": Capability(
        "a Python that has Swift, an object store",
        "export COSMOS_SWIFT_PYTHON=$(scripts/s3_environment.sh)",
    ),
    "attributes": Capability("extended attributes of files", "TMPDIR on another file system"),
    "slurm": Capability("SLURM's daemons and commands", "scripts/install_slurm.sh"),
    "linux": Capability("Linux", "another machine"),
    "machines": Capability(
        "network namespaces, root and iproute2", f"apt-get install iproute2; {_SYSTEM}"
    ),
    "namespaces": Capability("user, process and mount namespaces", _SYSTEM),
    "own-files": Capability("namespaces, and mounts that Linux 5.12 has", _SYSTEM),
    "landlock": Capability("Landlock, and namespaces", _SYSTEM),
    "tracing": Capability(
        "the right to trace one's children and read their memory", "docker run --cap-add SYS_PTRACE"
    ),
    "ipv6": Capability("IPv6 on the loopback interface", "sysctl net.ipv6.conf.all.disable_ipv6=0"),
    "amx": Capability("a processor with AMX, for kernels of vLLM", "such a machine", in_all=False),
    "two-gpus": Capability("two CUDA devices: NCCL joins no two ranks on one", "", in_all=False),
    "no-gpu": Capability("a machine without a CUDA device", "", in_all=False),
    "mlflow": Capability("MLflow, in an environment of its own", "scripts/check_mlflow.sh", False),
    "verifiers-0.4": Capability(
        "verifiers 0.4, in an environment of its own", "scripts/check_verifiers.sh", in_all=False
    ),
    "no-matplotlib": Capability(
        "an environment without matplotlib",
        "scripts/check_standalone.sh weightsync",
        in_all=False,
    ),
    "no-torchvision": Capability(
        "an environment without torchvision", "make setup, which puts it beside", in_all=False
    ),
}
_IMPORT = re.compile(r"could not import '(\w+)")


def needs(name: str, is_there: bool) -> pytest.MarkDecorator:
    """Return a mark of tests that are skipped unless something is there."""
    return pytest.mark.skipif(not is_there, reason=_reason(name))


def skip_without(name: str, why: str = "") -> NoReturn:
    """Skip the test, the fixture's tests or the module: something is not there.

    Args:
        name: of the capability.
        why: what was found instead.
    """
    __tracebackhide__ = True  # the caller is where it was skipped
    pytest.skip(_reason(name, why), allow_module_level=True)


def _reason(name: str, why: str = "") -> str:
    found = CAPABILITIES[name]
    told = f"waits for {found.wanted}" + (f" ({why.strip()})" if why.strip() else "")
    return f"{name}: {told}" + (f": {found.remedy}" if found.remedy else "")


def capability_of(reason: str) -> str | None:
    """Return the name of what a skip's reason says is not there; None if it is none of ours."""
    reason = reason.removeprefix("Skipped: ")
    if found := _IMPORT.match(reason):
        return found[1] if found[1] in CAPABILITIES else "packages"
    name = reason.partition(":")[0]
    return name if name in CAPABILITIES else None


def required_by(option: str) -> frozenset[str]:
    """Return the names that ``--require`` names, with all that ``all`` stands for.

    Raises:
        UsageError: no capability has such a name.
    """
    names = {name.strip() for name in option.split(",") if name.strip()}
    if "all" in names:
        names |= {name for name, capability in CAPABILITIES.items() if capability.in_all}
    unknown = names - {"all", *CAPABILITIES}
    if unknown:
        known = ", ".join(["all", *CAPABILITIES])
        raise pytest.UsageError(f"--require: no {', '.join(sorted(unknown))}; there are {known}")
    return frozenset(names - {"all"})


def refusal(reason: str, required: frozenset[str]) -> str:
    """Say why a skip is a failure where this is required; nothing if it is none."""
    name = capability_of(reason)
    if not required or (name is not None and name not in required):
        return ""
    if name is None:
        return f"skipped for a reason that tests/support/capabilities.py does not know: {reason}"
    return f"--require {name}, which is not there: {reason.removeprefix('Skipped: ')}"


def summary(reasons: Iterable[str]) -> list[str]:
    """Return a line for each thing that was not there: how many skips, and what would help."""
    counts = Counter(capability_of(reason) or reason for reason in reasons)
    lines: list[str] = []
    for name, count in sorted(counts.items()):
        known = CAPABILITIES.get(name)
        told = f"{known.wanted}: {known.remedy or 'another machine'}" if known else "no known name"
        lines.append(f"{name}: {count} skipped, waiting for {told}")
    return lines
