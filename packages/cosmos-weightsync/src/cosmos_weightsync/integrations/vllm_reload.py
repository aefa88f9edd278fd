"""Filling a running vLLM model with another version, exactly, on CPU too.

The one module that depends on how a version of vLLM keeps and post-processes weights; written for
0.32 and 0.33. vLLM remembers what every module's parameters looked like before they were
post-processed (*load format*). To load a version, a module's parameters are made anew in load
format, filled, post-processed, and copied into the memory that the running model reads, whose
addresses stay. One module at a time needs the extra memory.

Three things that vLLM's own reload forgets on CPU, where weights are repacked after loading:

* Experts are packed on the first load only, since the fused-MoE method keeps its kernel; later
  loads put unpacked weights where packed ones are read. Forgetting the kernel packs again.
* A head tied to the embedding keeps a packed copy of the old embedding in a closure. Building
  the closure again, once everything is loaded, reads the new one.
* Latent attention on processors with AMX packs the projection of its keys and values for itself and
  gives up the original: packed again while the new one is whole, and left alone where none came.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import (
    materialize_meta_tensor,
    restore_layer_on_meta,
)
from vllm.platforms import current_platform

__all__ = ["EngineTensor", "PlainTensors", "Reload", "load_format", "num_loadable"]


@dataclass(frozen=True, eq=False, slots=True)
class EngineTensor:
    """A parameter or buffer of the engine in load format, without its values.

    Attributes:
        module: Path of the module that has it.
        name: Its name there.
        tensor: On the meta device, or the live one where vLLM never replaces it.
        is_required: Whether the running model has a parameter here that is not tied to another.
    """

    module: str
    name: str
    tensor: Tensor
    is_required: bool


@dataclass(frozen=True, eq=False, slots=True)
class _Kernel:
    """A module's tensors as the running model reads them."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    non_persistent: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> "_Kernel":
        derived = frozenset(module._non_persistent_buffers_set)  # pyright: ignore[reportPrivateUsage]
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        return cls(own, buffers, derived)

    def put_back(self, module: nn.Module) -> None:
        for name in _Kernel.of(module).all():
            delattr(module, name)
        for name, parameter in self.parameters.items():
            module.register_parameter(name, parameter)  # pyright: ignore[reportArgumentType]
        for name, buffer in self.buffers.items():
            module.register_buffer(name, buffer, persistent=name not in self.non_persistent)

    def all(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}


class PlainTensors:
    """The tensors of a model that are neither parameters nor buffers, to be put back later."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._values = self._now()

    def restore(self) -> list[str]:
        """Undo every change since; returns what had changed."""
        now = self._now()
        changed = [at for at, value in now.items() if self._values.get(at) is not value]
        for path, name in changed:
            if (path, name) in self._values:
                vars(self._modules[path])[name] = self._values[path, name]
            else:
                del vars(self._modules[path])[name]
        return [f"{path}.{name}".lstrip(".") for path, name in changed]

    def _now(self) -> dict[tuple[str, str], Tensor]:
        return {
            (path, name): value
            for path, module in self._modules.items()
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        }


@contextmanager
def load_format(model: nn.Module) -> Generator[list[EngineTensor]]:
    """Put the model in load format, without values; inside it cannot run."""
    required = {name for name, _ in model.named_parameters()}
    modules = dict(model.named_modules())
    kernels = {path: _Kernel.of(module) for path, module in modules.items()}
    try:
        for module in modules.values():
            restore_layer_on_meta(module, get_layerwise_info(module))
        yield [
            EngineTensor(path, name, tensor, f"{path}.{name}".lstrip(".") in required)
            for path, module in modules.items()
            for name, tensor in _Kernel.of(module).all().items()
        ]
    finally:
        for path, module in modules.items():
            kernels[path].put_back(module)


def num_loadable(tensor: Tensor) -> int:
    """How many elements of a parameter a checkpoint fills; the rest is padding."""
    return int(getattr(tensor, "weight_loader_numel", tensor.numel()))


Filler = Callable[[Tensor], None]
"""Writes the new values into one parameter in load format."""


class Reload:
    """One version on its way into a model that is not running.

    Call `fill` for each module, `load_whole` at most once, and `finish` at the end.

    Args:
        model: Whose generation is paused.
        model_config: vLLM's.
    """

    def __init__(self, model: nn.Module, model_config: ModelConfig) -> None:
        self._model = model
        self._model_config = model_config
        self._modules = dict(model.named_modules())
        self._attention = [m for m in self._modules.values() if is_deferred_attention_layer(m)]
        self._packers = dict(filter(None, map(_packer, self._attention)))

    def fill(self, path: str, fillers: Mapping[str, Filler]) -> None:
        """Give one module new values."""
        module = self._modules[path]
        kernel = _Kernel.of(module)
        try:
            _make_load_format(module, kernel, fillers)
            self._process(module)
            _copy_to_kernel(module, kernel, fillers)
        finally:
            kernel.put_back(module)

    def load_whole(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        fillers: Mapping[str, Mapping[str, Filler]],
    ) -> None:
        """Give checkpoint tensors to the model's own loader.

        Args:
            tensors: Whole, by checkpoint name.
            fillers: Every module that they go to, and all of its parameters that are written.
        """
        kernels = {path: _Kernel.of(self._modules[path]) for path in fillers}
        try:
            for path, kernel in kernels.items():
                _make_load_format(self._modules[path], kernel, fillers[path])
            self._model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
            for path, kernel in kernels.items():
                self._process(self._modules[path])
                _copy_to_kernel(self._modules[path], kernel, fillers[path])
        finally:
            for path, kernel in kernels.items():
                kernel.put_back(self._modules[path])

    def finish(self) -> None:
        """Bring up to date what is derived from several modules; the model can run again."""
        packers = set(self._packers.values())
        for attention in self._attention:
            if attention not in packers:
                self._process_attention(attention)
        if current_platform.is_cpu():
            for module in self._modules.values():
                if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                    module.quant_method.process_weights_after_loading(module)

    def _process(self, module: nn.Module) -> None:
        _process(module)
        if module in self._packers:
            self._process_attention(self._packers[module])

    def _process_attention(self, attention: nn.Module) -> None:
        process = attention.process_weights_after_loading
        process(self._model_config.dtype)  # pyright: ignore[reportCallIssue]


def _packer(attention: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Latent attention that gave up its projection, which comes first."""
    projection = getattr(attention, "kv_b_proj", None)
    if not isinstance(projection, nn.Module) or not getattr(attention, "is_amx_bmm_enabled", False):
        return None
    return projection, attention


def _make_load_format(module: nn.Module, kernel: _Kernel, fillers: Mapping[str, Filler]) -> None:
    """New tensors in load format where something is written, filled; the rest as it is."""
    info = get_layerwise_info(module)
    restore_layer_on_meta(module, info)
    live = kernel.all()
    for name, tensor in _Kernel.of(module).all().items():
        if tensor.is_meta:
            old = live.get(name)
            is_same = old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
            if name not in fillers and is_same:
                setattr(module, name, old)
                continue
            with info.restore_device:
                made = materialize_meta_tensor(tensor)
            made.zero_()
            setattr(module, name, made)
        if name in fillers:
            fillers[name](getattr(module, name))


def _process(module: nn.Module) -> None:
    """What vLLM does with a module after loading it."""
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return
    if hasattr(module, "_already_called_process_weights_after_loading"):
        delattr(module, "_already_called_process_weights_after_loading")
    if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
        setattr(method, "moe_kernel", None)  # noqa: B010 - a field of vLLM's, not ours
    method.process_weights_after_loading(module)
    if hasattr(module, "update_param_tp_status"):
        module.update_param_tp_status()  # pyright: ignore[reportCallIssue]


def _copy_to_kernel(module: nn.Module, kernel: _Kernel, fillers: Mapping[str, Filler]) -> None:
    """Move the outcome to the addresses that the running model reads."""
    made = _Kernel.of(module).all()
    for name, old in kernel.all().items():
        new = made.get(name)
        is_derived = name in kernel.non_persistent and name not in fillers
        if new is None or new is old or is_derived:
            continue
        old.data.copy_(new)
