"""Moving what training needs to the host and back, in place: views of it stay views of it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cosmos_parallel import reshard


class PutAway:
    """The weights, gradients and moments of a policy, on the device or on the host.

    Their storages are emptied and filled again; tensors, shards and views of them stay the objects
    that they are, so a sender of weights and sharded modules need not know.

    Args:
        models: the one that is trained, and those that it is compared with.
        optimizer: what holds state beside it.
        averages: of its weights, if such are kept.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        averages: Sequence[Tensor] = (),
    ) -> None:
        self._models = tuple(models)
        self._optimizer = optimizer
        self._averages = tuple(averages)
        self._host: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def away(self) -> int:
        """Free the device's memory; return how many bytes. Idempotent."""
        if self._host:
            return 0
        for model in self._models:
            reshard(model)  # the root of a frozen one stays gathered after it has scored
        freed = 0
        seen: set[int] = set()
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            known = storage.data_ptr() in seen
            if storage.nbytes() and storage.resizable() and not known:
                seen.add(storage.data_ptr())
                self._host.append((storage, _host_copy(storage)))
        for storage, _ in self._host:
            freed += storage.nbytes()
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def back(self) -> None:
        """Fill the device's memory again, to the same bits. Idempotent."""
        for storage, host in self._host:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._host.clear()

    def _tensors(self) -> Iterator[Tensor]:
        for model in self._models:
            for tensor in (*model.parameters(), *model.buffers()):
                yield from _parts(tensor)
                if tensor.grad is not None:
                    yield from _parts(tensor.grad)
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    yield from _parts(value)
        for average in self._averages:
            yield from _parts(average)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Give what has memory: this rank's part, and of a quantised one its codes and scales."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if not is_traceable_wrapper_subclass(local):
        yield local
        return
    names, _ = local.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(local, name))


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
    copy.copy_(storage)
    return copy
