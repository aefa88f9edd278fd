"""Puts tests/support on the path also where pytest's own setting for it is off."""

import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).parents[2] / "support")
if _SUPPORT not in sys.path:
    sys.path.append(_SUPPORT)
