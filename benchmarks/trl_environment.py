"""Environments of what we are compared with, beside the workspace's own libraries, which they see.

Both sides so run on the same torch and transformers, and nothing of theirs gets into the workspace.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "runs" / "bench"


def trl_python() -> Path:
    """Return the interpreter of TRL's environment, made at the first call."""
    return python_with("trl")


def python_with(name: str) -> Path:
    """Return the interpreter of an environment, made at the first call.

    Args:
        name: Of ``requirements-<name>.txt`` beside this file, installed without dependencies.
    """
    environment = FOLDER / f"venv-{name}"
    requirements = HERE / f"requirements-{name}.txt"
    python, stamp = environment / "bin" / "python", environment / "installed.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment))
    site = _run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    own = sysconfig.get_path("purelib")
    (Path(site.strip()) / "workspace.pth").write_text(own + "\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    _run(*pip, "install", "--quiet", "--no-deps", "-r", str(requirements))
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(*command: str) -> str:
    """Run a command to its end and return what it printed; its errors go to ours."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
