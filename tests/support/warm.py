"""Imported by who forks the scripts of tests: what they import; see `process_trees`.

What is not installed is left out, as where one package is tested by itself.
"""

import contextlib
import gc
import importlib

_MODULES = (
    "cosmos_parallel",
    "cosmos_algos",
    "cosmos_wfm",
    "cosmos_weightsync",
    "cosmos_app.roles.policy",
    "cosmos_app.quickstart.tiny_model",
    "cosmos_parallel.native.building",
    "torchtitan.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.tokenization_mistral_common",
    "peft",
)
# A third of what importing torch costs, and a twelfth of what ranks forked from it do, is Python's
# collector going through the modules. Scripts end before their garbage is worth its while.
gc.disable()
for _module in _MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_module)
gc.freeze()
