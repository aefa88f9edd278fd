"""A CUDA device made of host memory, for processes of a machine without one.

`device.cpp` is built against the torch that is installed, and put into it as a process imports it.
What runs there runs the code of GPUs: devices that do not mix, memory that the host cannot reach,
pinned copies, generators of the device, groups of NCCL, memory mapped by another process. What
streams left unordered is written to a file.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch

_FOLDER = Path(__file__).with_name("emulated_cuda")


def has_compiler() -> bool:
    """Whether it can be built here."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return shutil.which("g++") is not None and headers.exists()


def build(folder: Path) -> Path:
    """Compile the device into a folder; half a minute of one core."""
    installed = Path(torch.__path__[0])
    library = folder / "emulated_device.so"
    headers = (
        installed / "include",
        installed / "include" / "torch" / "csrc" / "api" / "include",
        sysconfig.get_paths()["include"],
    )
    command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++20", "-DUSE_C10D_GLOO"]
    command += [f"-I{header}" for header in headers]
    command += [str(_FOLDER / "device.cpp"), "-o", str(library), f"-L{installed / 'lib'}"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    subprocess.run([*command, f"-Wl,-rpath,{installed / 'lib'}"], check=True)
    return library


def environment(library: Path, num_devices: int, races: Path) -> Mapping[str, str]:
    """Return what a process and those it starts need in their environment to have devices.

    Args:
        library: from `build`.
        num_devices: where ``CUDA_VISIBLE_DEVICES`` does not name them.
        races: gets what was not ordered, with the line of Python that came second.
    """
    paths = [str(_FOLDER / "at_start"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "EMULATED_CUDA_LIBRARY": str(library),
        "EMULATED_CUDA_DEVICES": str(num_devices),
        "EMULATED_CUDA_RACES": str(races),
        "OMP_NUM_THREADS": "1",
    }
