"""Weight loaders, run once over tensors that hold nothing, to learn what they do.

A `TracedTensor` has the name, shape and dtype of a checkpoint tensor, and no memory. Whatever a
loader does to find its part (narrow, view, chunk, transpose, index, cast) is done to the strides
of an empty tensor; when it copies the outcome into one of its own tensors, `LoadTrace` notes which
elements go where. Arithmetic on values, or a copy that depends on them, cannot be followed: the
tensor is then listed in `LoadTrace.opaque`, with the operation that lost it.

```
traced = trace.tensor("model.norm.weight", (64,), torch.float32)
trace.watch(key, parameter)                  # every tensor that the loader may write to
with trace:
    model.load_weights([(name, traced), ...])
trace.copies                                 # Copy(name, source view, casts, key, target view)
```
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cosmos_weightsync.integrations.operations import (
    ANSWERS,
    CASTS,
    READS,
    SAME_VALUES,
    VIEWS,
    WRITES,
    Cast,
    changed_by,
    function_name,
    wanted_dtype,
    written_by,
)
from cosmos_weightsync.integrations.regions import Strided

__all__ = ["Constant", "Copy", "LoadTrace", "TracedTensor"]

_Unwatched = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage]
"""A context in which operations are carried out and not followed."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a checkpoint tensor that go into a watched tensor, cast on the way."""

    name: str
    source: Strided
    casts: tuple[Cast, ...]
    key: Hashable
    target: Strided


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that the loader writes by itself, such as zeros into padding."""

    value: Tensor | float
    key: Hashable
    target: Strided


class TracedTensor(Tensor):
    """What a loader is given instead of a checkpoint tensor. Made by `LoadTrace.tensor`."""

    label: str
    recorder: "LoadTrace"
    view_of: Tensor
    casts: tuple[Cast, ...]
    lost: frozenset[str]

    @staticmethod
    def make(
        trace: "LoadTrace",
        name: str,
        view_of: Tensor,
        casts: tuple[Cast, ...] = (),
        lost: frozenset[str] = frozenset(),
    ) -> "TracedTensor":
        """Wrap a view of an empty tensor of the checkpoint tensor's shape.

        Args:
            trace: Where to report.
            name: Of the checkpoint tensor.
            view_of: A view of an empty meta tensor, in the checkpoint's dtype.
            casts: To apply after reading it.
            lost: Names of the tensors that went into it beyond following; ``view_of`` then only
                has its shape.
        """
        traced = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            TracedTensor,
            view_of.shape,
            strides=view_of.stride(),
            dtype=casts[-1].dtype if casts else view_of.dtype,
            device=trace.device,
            requires_grad=False,
        )
        traced.label, traced.recorder, traced.view_of = name, trace, view_of
        traced.casts, traced.lost = casts, lost
        return traced

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Without values, which it has not."""
        return f"TracedTensor({self.label}, {tuple(self.view_of.shape)})"

    @property
    def names(self) -> frozenset[str]:
        """Every checkpoint tensor that is in it."""
        return self.lost or frozenset([self.label])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Follow one operation."""
        kwargs = kwargs or {}
        if function_name(func) in ANSWERS:
            with _Unwatched():
                return func(*args, **kwargs)
        found = _traced_in((*args, *kwargs.values()))
        return found[0].recorder.follow(func, found, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Never reached by what `LoadTrace.follow` knows; values do not exist."""
        raise NotImplementedError(f"{func} needs the values of a traced tensor")


class LoadTrace(TorchFunctionMode):
    """Watches a loader; active inside ``with``.

    Args:
        device: Where the checkpoint tensors seem to be.

    Attributes:
        copies: Everything copied into watched tensors, and what the loader wrote by itself, in
            the order in which it happened.
        opaque: Checkpoint tensors that could not be followed, with the reason.
        opaque_targets: The watched tensors that something opaque was copied into.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.device = torch.device(device)
        self.copies: list[Copy | Constant] = []
        self.opaque: dict[str, str] = {}
        self.opaque_targets: dict[Hashable, set[str]] = {}
        self._watched: dict[int, tuple[Hashable, Tensor]] = {}
        self._detours: set[str] = set()
        self._current = frozenset[str]()

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
        """The stand-in for one checkpoint tensor, which is behind what the loader does next."""
        self._current = frozenset([name])
        return TracedTensor.make(self, name, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def watch(self, key: Hashable, tensor: Tensor) -> None:
        """Note what is copied into ``tensor`` or views of it, under the first key it is given."""
        self._watched.setdefault(_storage(tensor), (key, tensor))

    # -- Operations on traced tensors ---------------------------------------------------------

    def follow(
        self,
        func: Callable[..., Any],
        found: Sequence[TracedTensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Carry out one operation in which traced tensors take part."""
        name = function_name(func)
        first = args[0] if args else None
        if name in WRITES and isinstance(first, Tensor) and not isinstance(first, TracedTensor):
            source = args[-1] if isinstance(args[-1], TracedTensor) else found[0]
            self._copy(first, args[1] if name == "__setitem__" else None, source, name)
            return first
        if len(found) == 1 and first is found[0]:
            if name in READS:
                self._mark(found[0].names, f"{name}() asks for its value")
                self._detours |= found[0].names
                return _zeros(found[0]).tolist() if name == "tolist" else READS[name]
            outcome = self._follow_one(func, name, found[0], args[1:], kwargs)
            if outcome is not NotImplemented:
                return outcome
        return self._lose(func, name, found, args, kwargs)

    def _follow_one(
        self,
        func: Callable[..., Any],
        name: str,
        traced: TracedTensor,
        rest: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """A cast or a view of one traced tensor; ``NotImplemented`` if it is neither."""
        if name in SAME_VALUES:
            return traced
        if name in CASTS or name in {"to", "type", "type_as"}:
            dtype = CASTS.get(name) or wanted_dtype((*rest, *kwargs.values()))
            return traced if dtype is None else _cast(traced, Cast(dtype))
        if name == "view" and len(rest) == 1 and isinstance(rest[0], torch.dtype):
            is_same_size = rest[0].itemsize == traced.dtype.itemsize
            cast = Cast(rest[0], reinterpret=True)
            return _cast(traced, cast) if is_same_size else NotImplemented
        with _Unwatched(), suppress(RuntimeError):
            if name in VIEWS and not _traced_in(rest):
                return _wrapped(traced, func(traced.view_of, *rest, **kwargs))
        return NotImplemented

    def _lose(
        self,
        func: Callable[..., Any],
        name: str,
        found: Sequence[TracedTensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """An operation that cannot be followed: only the shape of its outcome is right."""
        names = frozenset[str]().union(*(traced.names for traced in found))
        self._mark(names, f"{name} cannot be recorded")
        changed = [one for one in changed_by(name, args, kwargs) if not _traced_in([one])]
        if changed:
            self._lose_changed(changed, names)
            return changed[0]
        with _Unwatched():
            outcome = _outcome(func, args, kwargs)
        if isinstance(outcome, Tensor):
            return TracedTensor.make(self, min(names), outcome, lost=names)
        if isinstance(outcome, tuple | list):
            return type(outcome)(
                TracedTensor.make(self, min(names), part, lost=names)
                if isinstance(part, Tensor)
                else part
                for part in outcome
            )
        self._detours |= names  # Such as an array, of which nothing more is seen.
        return outcome

    def _mark(self, names: frozenset[str], reason: str) -> None:
        for name in names:
            self.opaque.setdefault(name, reason)

    def _copy(self, target: Tensor, index: Any, source: TracedTensor, name: str) -> None:
        """``target.copy_(source)`` or ``target[index] = source``."""
        with _Unwatched():
            region = target if index is None else target[index]
        known = self._watched.get(_storage(target))
        if known is None:
            self._mark(source.names, "it is copied into a temporary tensor")
            self._detours |= source.names
            return
        if _storage(region) != _storage(target) or name == "data=":
            self._mark(source.names, "it is not copied but put in place")
        if region.dtype != known[1].dtype:
            self._mark(source.names, f"it is written as {region.dtype} into {known[1].dtype}")
        if source.names.isdisjoint(self.opaque):
            with _Unwatched():
                view = source.view_of.expand(region.shape)
            target_view = _strided(region, known[1])
            self.copies.append(
                Copy(source.label, _strided(view), source.casts, known[0], target_view)
            )
        else:
            self._lose_target(known[0], source.names)

    def _lose_target(self, key: Hashable, names: frozenset[str]) -> None:
        self.opaque_targets.setdefault(key, set()).update(names)

    # -- Operations on the loader's own tensors -----------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note constants and detours on their way into watched tensors."""
        kwargs = kwargs or {}
        name = function_name(func)
        if found := _traced_in((*args, *kwargs.values())):
            if name == "data=":  # Which torch does not hand on to the traced tensor.
                return self.follow(func, found, args, kwargs)
            return func(*args, **kwargs)
        changed = changed_by(name, args, kwargs)
        if name in WRITES and args and isinstance(args[0], Tensor):
            changed = [args[0]]
        if not any(_storage(one) in self._watched for one in changed):
            return func(*args, **kwargs)
        if name not in WRITES or not self._is_constant(name, args, kwargs):
            self._lose_changed(changed, frozenset())
        return changed[0]

    def _is_constant(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note what is written into a watched tensor if it is a value of the loader's own."""
        target, value = args[0], written_by(name, args, kwargs)
        key, origin = self._watched[_storage(target)]
        with _Unwatched():
            region = target[args[1]] if name == "__setitem__" else target
        is_own = name == "zero_" or not self._detours
        is_own &= name != "data=" and not (isinstance(value, Tensor) and value.is_meta)
        if not is_own or region.dtype != origin.dtype or _storage(region) != _storage(target):
            return False
        copied = value.clone() if isinstance(value, Tensor) else float(value)
        self.copies.append(Constant(copied, key, _strided(region, origin)))
        return True

    def _lose_changed(self, tensors: Sequence[Tensor], names: frozenset[str]) -> None:
        """Tensors of the loader's own whose new values cannot be followed."""
        for known in filter(None, (self._watched.get(_storage(one)) for one in tensors)):
            lost = names | self._detours | self._sources_of(known[0]) | self._current
            self._mark(lost, "its destination is computed from it")
            self._lose_target(known[0], lost)
        if any(_storage(one) not in self._watched for one in tensors):
            self._detours |= names

    def _sources_of(self, key: Hashable) -> frozenset[str]:
        return frozenset(
            copy.name for copy in self.copies if isinstance(copy, Copy) and copy.key == key
        )


def _traced_in(values: Any) -> list[TracedTensor]:
    found: list[TracedTensor] = []
    for value in values:
        if isinstance(value, TracedTensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(_traced_in(value))
    return found


def _wrapped(traced: TracedTensor, outcome: Any) -> Any:
    """``outcome`` as traced tensors if all of it views what ``traced`` views."""
    if isinstance(outcome, tuple | list):
        parts = [_wrapped(traced, part) for part in outcome]
        return NotImplemented if NotImplemented in parts else type(outcome)(parts)
    if _storage(outcome) != _storage(traced.view_of):
        return NotImplemented
    return TracedTensor.make(traced.recorder, traced.label, outcome, traced.casts, traced.lost)


def _cast(traced: TracedTensor, cast: Cast) -> TracedTensor:
    if cast.dtype == traced.dtype:
        return traced
    casts = (*traced.casts, cast)
    return TracedTensor.make(traced.recorder, traced.label, traced.view_of, casts, traced.lost)


def _outcome(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What comes of an operation but for the values: on meta tensors, or else on zeros."""
    with suppress(NotImplementedError, RuntimeError, TypeError):
        return func(*_with(_meta, args), **{k: _with(_meta, v) for k, v in kwargs.items()})
    return func(*_with(_zeros, args), **{k: _with(_zeros, v) for k, v in kwargs.items()})


def _with(stand_in: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Something else for each tensor."""
    if isinstance(value, tuple | list):
        return type(value)(_with(stand_in, part) for part in value)
    return stand_in(value) if isinstance(value, Tensor) else value


def _meta(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, TracedTensor):
        return tensor.to("meta")
    plain = tensor.view_of
    return plain if plain.dtype == tensor.dtype else torch.empty_like(plain, dtype=tensor.dtype)


def _zeros(tensor: Tensor) -> Tensor:
    """A single one in memory, in place of a traced tensor."""
    if not isinstance(tensor, TracedTensor):
        return tensor
    with _Unwatched():
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.view_of.shape)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _strided(tensor: Tensor, within: Tensor | None = None) -> Strided:
    origin = 0 if within is None else int(within.storage_offset())
    return Strided(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - origin)
