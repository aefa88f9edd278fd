"""Names of fla's kernels, where that library is not installed: torchtitan's Qwen3.5 asks for them.

fla computes on GPUs alone, and where it is installed and there is none, transformers' own Qwen3.5
fails (it takes fla for a sign of a GPU). Nothing here computes; `cosmos_parallel.native.delta_rule`
does.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

import torch

_NAMES = {
    "fla.modules.conv.triton.ops": ("CausalConv1dFunction",),
    "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "fla.ops.gated_delta_rule.chunk": ("ChunkGatedDeltaRuleFunction",),
    "fla.ops.gated_delta_rule.fused_recurrent": ("FusedRecurrentFunction",),
}


def has_fla() -> bool:
    """Whether fla's kernels are installed."""
    found = find_spec("fla")
    return found is not None and found.origin is not None  # no directory that is called so


@contextmanager
def fla_or_its_names() -> Generator[None]:
    """Let torchtitan's Qwen3.5 be imported inside the block, with fla or without.

    Without it, classes that compute nothing stand for its kernels, and are gone behind the block:
    who looks for fla there finds that it is not installed.
    """
    if has_fla():
        yield
        return
    stood_in = _named_only()
    sys.modules.update(stood_in)
    try:
        yield
    finally:
        for name in stood_in:
            del sys.modules[name]


def _named_only() -> dict[str, ModuleType]:
    made: dict[str, ModuleType] = {}
    for path, names in _NAMES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            parent = ".".join(parts[:depth])
            made.setdefault(parent, ModuleType(parent))
        for name in names:
            # torchtitan registers those that are autograd functions, and calls none on import
            setattr(made[path], name, type(name, (torch.autograd.Function,), {}))
    return made
