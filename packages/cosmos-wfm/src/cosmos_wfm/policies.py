"""The policies that RL compares with: the one that sampled, and the one that training began from.

With LoRA both are nearly free: ``old`` is a second set of adapters in the same layers, the
reference is the model without any. With full tuning each is a copy of the denoiser, sharded as it
is.
"""

import copy
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.experts import denoisers_of

TRAINED = "default"
OLD = "old"


class Policies(Protocol):
    """What a loss may call beside the policy that is trained; nothing of it has a gradient."""

    def old(self) -> AbstractContextManager[nn.Module]:
        """Give the denoiser as it sampled; the trained one must not be called inside."""
        ...

    def reference(self) -> AbstractContextManager[nn.Module]:
        """Give the denoiser as training found it; the trained one must not be called inside."""
        ...

    def update_old(self, decay: float) -> None:
        """Move the old policy: old ← decay · old + (1 - decay) · trained; every rank calls."""
        ...

    def weights(self, *, old: bool) -> Mapping[str, Tensor]:
        """Return the weights that change, by the names they have in the denoiser that is trained.

        Args:
            old: those of the old policy, instead of the trained one's.
        """
        ...

    def modules(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Return the copies that are to be sharded like the denoiser, each with its blocks."""
        ...


class LoraPolicies:
    """Adapters ``default`` (trained) and ``old`` in one denoiser; the reference has none active."""

    def __init__(self, adapter: DiffusionModelAdapter) -> None:
        """Add the adapters ``old`` with the weights of ``default``.

        Call before an optimizer or an average takes the parameters, and before the denoiser is
        sharded or wrapped.

        Raises:
            WfmConfigError: if the denoiser has no adapters of that name, has ``old`` ones already,
                or if more than adapters is trained, which could not be switched off.
        """
        self._transformer = adapter.transformer
        # peft's mixin is not in nn.Module's type
        self._parts: Sequence[Any] = list(denoisers_of(adapter).values())
        for part in self._parts:
            settings = _lora_settings(part)
            with warnings.catch_warnings():  # that there are two adapters now is the point
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")
                part.add_adapter(settings, adapter_name=OLD)
        self._activate(TRAINED)
        self._copy_type()
        self.update_old(0.0)

    @contextmanager
    def old(self) -> Generator[nn.Module]:
        """Switch to the adapters ``old`` inside the block."""
        self._activate(OLD)
        try:
            with torch.no_grad():
                yield self._transformer
        finally:
            self._activate(TRAINED)

    @contextmanager
    def reference(self) -> Generator[nn.Module]:
        """Switch all adapters off inside the block."""
        for part in self._parts:
            part.disable_adapters()
        self._mark_trained()  # FSDP2 looks which are at its first pass, which this may be
        try:
            with torch.no_grad():
                yield self._transformer
        finally:
            for part in self._parts:
                part.enable_adapters()
            self._activate(TRAINED)

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """Average the adapters' weights."""
        weights = dict(self._transformer.named_parameters())
        for name, old in weights.items():
            if f".{OLD}." in name:
                trained = weights[name.replace(f".{OLD}.", f".{TRAINED}.")]
                _local(old).lerp_(_local(trained), 1.0 - decay)

    def weights(self, *, old: bool) -> Mapping[str, Tensor]:
        """Return the adapters, as those of ``default``."""
        mark = f".{OLD if old else TRAINED}."
        named = self._transformer.named_parameters()
        return {name.replace(mark, f".{TRAINED}."): w for name, w in named if mark in name}

    def modules(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Return none: everything is in the denoiser."""
        return ()

    def _copy_type(self) -> None:
        """Give ``old`` the type of ``default``, which may be wider than that of the denoiser."""
        weights = dict(self._transformer.named_parameters())
        for name, old in weights.items():
            if f".{OLD}." in name:
                old.data = old.data.to(weights[name.replace(f".{OLD}.", f".{TRAINED}.")].dtype)

    def _activate(self, name: str) -> None:
        """Choose adapters and what takes a gradient, which peft would otherwise also decide."""
        for part in self._parts:
            part.set_adapter(name)
        self._mark_trained()

    def _mark_trained(self) -> None:
        for parameter_name, parameter in self._transformer.named_parameters():
            if f".{OLD}." in parameter_name or f".{TRAINED}." in parameter_name:
                parameter.requires_grad_(f".{TRAINED}." in parameter_name)


def _lora_settings(part: nn.Module) -> Any:
    """Return the settings of the adapters that are trained.

    Raises:
        WfmConfigError: says what is wrong with them.
    """
    named: Mapping[str, Any] = getattr(part, "peft_config", {})
    if TRAINED not in named or OLD in named:
        there = ", ".join(named) or "none"
        raise WfmConfigError(
            f"policies: {type(part).__name__} has no LoRA adapters called {TRAINED!r} alone (there "
            f"are: {there}); add them to the denoiser itself with add_adapter(LoraConfig(...)), "
            "once, before it is wrapped"
        )
    beside = [
        name
        for name, parameter in part.named_parameters()
        if parameter.requires_grad and f".{TRAINED}." not in f"{name}."
    ]
    if beside:
        raise WfmConfigError(
            f"policies: {beside[0]} is trained beside the adapters, {len(beside)} parameters in "
            "all; the old policy and the reference would have it as trained. Train adapters alone, "
            "or all weights with CopiedPolicies"
        )
    if named[TRAINED].modules_to_save:
        raise WfmConfigError(
            f"policies: modules_to_save is {named[TRAINED].modules_to_save}, which diffusers does "
            "not switch with the adapters; the old policy and the reference would have them as "
            "trained. Leave it empty"
        )
    return named[TRAINED]


class CopiedPolicies:
    """Copies of a denoiser all of whose weights are trained."""

    def __init__(self, adapter: DiffusionModelAdapter, *, old: bool, reference: bool) -> None:
        """Copy the denoiser as it is; call before sharding.

        Args:
            adapter: whose denoiser is trained.
            old: keep an old policy.
            reference: keep a reference.
        """
        self._trained = adapter.transformer
        names = {id(module): name for name, module in self._trained.named_modules()}
        self._block_names = [names[id(block)] for block in adapter.blocks]
        self._old = self._copy() if old else None
        self._reference = self._copy() if reference else None

    @property
    def old_copy(self) -> nn.Module | None:
        """The old policy itself, of which a checkpoint has to know if it is not the newest."""
        return self._old

    @contextmanager
    def old(self) -> Generator[nn.Module]:
        """Give the old policy's copy."""
        yield from self._give(self._old, "old policy")

    @contextmanager
    def reference(self) -> Generator[nn.Module]:
        """Give the reference's copy."""
        yield from self._give(self._reference, "reference")

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """Average all weights."""
        if self._old is None:
            return
        if isinstance(self._old, FSDPModule):
            self._old.reshard()  # after a forward pass alone FSDP2 leaves the root gathered
        trained = dict(self._trained.named_parameters())
        for name, old in self._old.named_parameters():
            _local(old).lerp_(_local(trained[name]), 1.0 - decay)

    def weights(self, *, old: bool) -> Mapping[str, Tensor]:
        """Return all weights of the copy, or of the denoiser itself."""
        module = self._old if old else self._trained
        assert module is not None
        return dict(module.named_parameters())

    def modules(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        """Return the copies that there are."""
        copies = [module for module in (self._old, self._reference) if module is not None]
        return [(m, [m.get_submodule(name) for name in self._block_names]) for m in copies]

    def _copy(self) -> nn.Module:
        return copy.deepcopy(self._trained).requires_grad_(False).eval()

    def _give(self, module: nn.Module | None, name: str) -> Generator[nn.Module]:
        if module is None:
            raise WfmConfigError(f"policies: no {name} is kept for this algorithm")
        with torch.no_grad():
            yield module


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
