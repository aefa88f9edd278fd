"""Looking at gradients: those of one pass before ranks add them up, and what became of the sum."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cosmos_parallel.gradients import local_part


@contextmanager
def watched_gradients(model: nn.Module) -> Generator[list[str]]:
    """Give a list that names each parameter whose gradient is not finite in the block.

    A module is looked into as it runs, since FSDP2 puts whole parameters in place of parts only
    then; what reaches these is this rank's own. Inside layers that were compiled before, nothing
    is seen.
    """
    found: list[str] = []
    seen: dict[int, Tensor] = {}
    handles: list[RemovableHandle] = []

    def look(name: str, grad: Tensor) -> None:
        if name not in found and not local_part(grad).isfinite().all():
            found.append(name)

    def watch(prefix: str, module: nn.Module, _: object) -> None:
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen[id(parameter)] = parameter
                handles.append(parameter.register_hook(partial(look, name)))

    for prefix, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(watch, prefix)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def not_finite_gradients(model: nn.Module) -> list[str]:
    """Return the parameters whose gradient, in the part that this rank has, is not finite."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not local_part(parameter.grad).isfinite().all()
    ]
