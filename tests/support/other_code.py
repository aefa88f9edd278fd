"""A copy of cosmos_core whose messages are not ours: what another release looks like on the bus."""

import os
import shutil
import sys
from pathlib import Path

import cosmos_core


def copy_with_other_messages(root: Path) -> dict[str, str]:
    """Copy the package below ``root``, one event with another field; return who imports it how."""
    package = root / "cosmos_core"
    shutil.copytree(Path(cosmos_core.__file__).parent, package)
    text = (package / "messages.py").read_text()
    changed = text.replace("    stall_s: float\n", "    stall_s: float\n    kept_s: float\n")
    assert changed != text
    (package / "messages.py").write_text(changed)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
