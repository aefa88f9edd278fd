"""Compiles `native/streaming.c` when a wheel is built or the package is installed editable.

Without a C compiler the package is built all the same: it then copies and hashes with NumPy.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "src/cosmos_weightsync/_streaming.so"


class StreamingBuildHook(BuildHookInterface[Any]):
    """Adds the library to what is built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each build."""
        root = Path(self.root)
        if not compile_library(root / "native/streaming.c", root / LIBRARY):
            self.app.display_warning("no C compiler: copies will be slower")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(LIBRARY)


def compile_library(source: Path, library: Path) -> bool:
    """Whether there is a compiler and it made the library; one that is in use is replaced whole."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        return False
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:  # Where no build looks.
        made = Path(folder, library.name)
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(made), str(source)]
        if subprocess.run(command, check=False).returncode != 0:
            return False
        os.replace(made, library)
    return True
