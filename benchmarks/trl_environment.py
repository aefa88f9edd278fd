"""The baseline's environment: TRL beside the workspace's own libraries, which it sees and shares.

Both systems so run on the same torch and transformers, and nothing of TRL gets into the workspace.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent / "runs" / "bench" / "venv-trl"
REQUIREMENTS = HERE / "requirements-trl.txt"


def trl_python() -> Path:
    """Return the interpreter of the baseline's environment, made at the first call."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "installed.txt"
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(ENVIRONMENT))
    site = _run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    own = sysconfig.get_path("purelib")
    (Path(site.strip()) / "workspace.pth").write_text(own + "\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    _run(*pip, "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS))
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(*command: str) -> str:
    """Run a command to its end and return what it printed; its errors go to ours."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
