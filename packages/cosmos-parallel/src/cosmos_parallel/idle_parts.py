"""Parts of models that some rows do not go through, kept in every backward pass.

FSDP2 reduces the gradients that a rank has: where ranks differ in which those are, they wait in
different collectives. LongCat-Flash's tokens may all go to experts that compute nothing, and
DeepSeek-V4 compresses no row that is shorter than its window. Such parts take part with an empty
piece of each parameter, whose gradient is 0; on one process too, whose steps are then the same.
"""

from typing import Any

from torch import Tensor, nn

# by their classes: which parts of them never have a gradient, and go without one
_IDLE_AT_TIMES = {
    "LongcatFlashExperts": "",
    "DeepseekV4HCACompressor": "",
    "DeepseekV4CSACompressor": "indexer.",
}


def keep_idle_parts(model: nn.Module) -> None:
    """Have parts of a model that may go without tokens take part in every pass, in place.

    Args:
        model: of transformers, with its adapters, before tensor parallelism splits it.
    """
    for part in model.modules():
        left_out = _IDLE_AT_TIMES.get(type(part).__name__)
        if left_out is not None:
            part.register_forward_hook(_TakesPart(part, left_out))


class _TakesPart:
    """A forward hook, with the names of parameters: what they are may be exchanged meanwhile."""

    def __init__(self, part: nn.Module, left_out: str) -> None:
        """Take the names of parameters; those that begin with ``left_out`` do not take part."""
        self._names = [
            name
            for name, _ in part.named_parameters()
            if not left_out or not name.startswith(left_out)
        ]

    def __call__(self, part: nn.Module, _: Any, output: Any) -> Any:
        """Add nothing to the output, or to the first of several."""
        if isinstance(output, tuple):
            return (self._with_all(part, output[0]), *output[1:])
        return self._with_all(part, output)

    def _with_all(self, part: nn.Module, output: Tensor) -> Tensor:
        for name in self._names:
            owner, _, own = name.rpartition(".")
            value: Tensor = getattr(part.get_submodule(owner), own)
            if value.requires_grad:
                output = output + value.flatten()[:0].sum().to(output.dtype)
        return output
