"""Shapes and dtypes in the signatures of cosmos_algos are checked at run time, in its tests."""

import sys
from importlib.util import find_spec

from jaxtyping import install_import_hook

if find_spec("beartype") and "cosmos_algos" not in sys.modules:
    install_import_hook("cosmos_algos", "beartype.beartype")
