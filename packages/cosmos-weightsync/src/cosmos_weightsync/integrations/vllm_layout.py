"""What one vLLM worker needs of a checkpoint, found out by asking its own loader.

The model's ``load_weights`` runs once over tensors that hold nothing (`tracing`), into parameters
that hold nothing either. What it would have copied where becomes a `WorkerLayout`: the boxes of
every checkpoint tensor that this worker reads, and the steps that fill its parameters from them.
Fused projections, expert maps, replicated heads and padded vocabularies come out by themselves;
no table of models exists.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import UnknownTensorError
from cosmos_weightsync.integrations.operations import Cast
from cosmos_weightsync.integrations.regions import (
    Region,
    Strided,
    boxes_of_view,
    merge_overlapping,
)
from cosmos_weightsync.integrations.tracing import Constant, Copy, LoadTrace
from cosmos_weightsync.integrations.vllm import AsyncEngine
from cosmos_weightsync.integrations.vllm_reload import (
    EngineTensor,
    PlainTensors,
    load_format,
    num_loadable,
)
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.shards import torch_dtype

__all__ = ["Fill", "Step", "WorkerLayout", "discover_layout", "engine_layout"]


@dataclass(frozen=True, slots=True)
class Step:
    """Copy ``source`` of the received box ``box`` of ``name`` to ``target`` of a parameter."""

    name: str
    box: Box
    source: Strided
    casts: tuple[Cast, ...]
    target: Strided

    def apply(self, received: Tensor, parameter: Tensor) -> None:
        """Do it, given the contiguous tensor of the box."""
        flat = received.reshape(-1)
        offset = flat.storage_offset() + self.source.offset  # It may lie among others.
        values = flat.as_strided(self.source.shape, self.source.strides, offset)
        for to in self.casts:
            values = to(values)
        _view(parameter, self.target).copy_(values)


@dataclass(frozen=True, slots=True)
class Fill:
    """Write a constant, as the loader does into padding."""

    value: Tensor | float
    target: Strided

    def apply(self, parameter: Tensor) -> None:
        """Do it."""
        region = _view(parameter, self.target)
        if isinstance(self.value, Tensor):
            region.copy_(self.value)
        else:
            region.fill_(self.value)


@dataclass(frozen=True, eq=False, slots=True)
class WorkerLayout:
    """What a worker fetches, and what it does with it.

    Attributes:
        specs: The boxes it needs, in the dtype in which the senders send.
        steps: How every parameter is filled, by module and name; in the loader's order.
        whole: Tensors that are fetched whole and given to the engine's loader, each with the
            operation that could not be recorded.
        whole_targets: The parameters that the loader writes them to, as (module, name).
        unused: Names that this worker does not read.
    """

    specs: tuple[ShardSpec, ...]
    steps: Mapping[str, Mapping[str, tuple[Step | Fill, ...]]]
    whole: Mapping[str, str]
    whole_targets: frozenset[tuple[str, str]]
    unused: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """What one version costs this worker on the wire."""
        return sum(spec.num_bytes for spec in self.specs)

    def report(self) -> str:
        """What was found, for a person."""
        num_traced = len({spec.name for spec in self.specs}) - len(self.whole)
        lines = [
            f"{num_traced} tensors followed, {len(self.specs)} boxes, {self.num_bytes:,} bytes; "
            f"{len(self.whole)} left to the engine's loader; {len(self.unused)} not used"
        ]
        lines += [f"  {name}: {reason}" for name, reason in self.whole.items()]
        return "\n".join(lines)


def discover_layout(
    model: nn.Module, senders: Layout, *, missing: Literal["refuse", "keep"] = "refuse"
) -> WorkerLayout:
    """Run the model's loader over tensors that hold nothing.

    Takes the model's parameters away while it runs, so the model must not run meanwhile; they are
    back, untouched, when it returns or raises.

    Args:
        model: A loaded vLLM model.
        senders: What is sent, in checkpoint names.
        missing: What becomes of modules to which nothing is sent: ``"keep"`` them as they are, for
            senders of trained tensors only, or ``"refuse"`` the senders.

    Raises:
        UnknownTensorError: the loader refuses a tensor, or a parameter would get nothing.
    """
    trace = LoadTrace()
    kept = PlainTensors(model)
    with load_format(model) as tensors:
        for tensor in tensors:
            trace.watch((tensor.module, tensor.name), tensor.tensor)
        try:
            _run_loader(model, senders, trace)
        finally:
            derived = kept.restore()
        for name in senders.tensors if derived else ():
            trace.opaque.setdefault(name, f"the loader computes {derived[0]} after loading")
        whole_keys = _spread_opaque(trace)
        copies = [c for c in trace.copies if isinstance(c, Constant) or c.name not in trace.opaque]
        if missing == "keep":
            sent = _modules_sent_to(copies)
            tensors = [tensor for tensor in tensors if tensor.module in sent]
        _check_all_filled(tensors, copies, whole_keys)
    regions = [_regions_of(copy, senders) for copy in copies]
    boxes = _needed_boxes(copies, regions)
    whole = {name: reason for name, reason in trace.opaque.items() if name in senders.tensors}
    used = boxes.keys() | whole.keys()
    return WorkerLayout(
        specs=tuple(_specs(senders, boxes, whole)),
        steps=_steps(copies, regions, boxes, senders),
        whole=whole,
        whole_targets=frozenset(whole_keys),
        unused=tuple(name for name in senders.tensors if name not in used),
    )


async def engine_layout(engine: AsyncEngine) -> Layout:
    """What the workers of a running engine fetch, rank by rank, for `plan_transfer` and the like.

    Args:
        engine: An ``AsyncLLM`` whose `VLLMWeightClient` is connected to the senders: their tensors
            are what its loader was asked about.
    """
    answers = await engine.collective_rpc("cosmos_layout")
    return Layout.merge([Layout.from_json(answer) for answer in answers])


def _run_loader(model: nn.Module, senders: Layout, trace: LoadTrace) -> None:
    current = "the first tensor"

    def traced() -> Iterator[tuple[str, Tensor]]:
        nonlocal current
        for name, entry in senders.tensors.items():
            current = name
            yield name, trace.tensor(name, senders.shape_of(name), torch_dtype(entry.dtype))

    try:
        with torch.no_grad(), _renewed_parameters_watched(model, trace), trace:
            model.load_weights(traced())  # pyright: ignore[reportCallIssue]
    except Exception as error:
        raise UnknownTensorError(
            f"{current}: the engine's loader cannot take it: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _renewed_parameters_watched(model: nn.Module, trace: LoadTrace) -> Generator[None]:
    """Some loaders make a parameter anew before they fill it: what goes in there is noted too."""
    paths = {id(module): path for path, module in model.named_modules()}

    def watch(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is not None and id(module) in paths:
            trace.watch((paths[id(module)], name), parameter)

    hook = register_module_parameter_registration_hook(watch)
    try:
        yield
    finally:
        hook.remove()


def _spread_opaque(trace: LoadTrace) -> set[tuple[str, str]]:
    """Everything that the loader will write when it is given the opaque tensors whole."""
    keys = set(trace.opaque_targets)
    keys |= {c.key for c in trace.copies if isinstance(c, Copy) and c.name in trace.opaque}
    return cast("set[tuple[str, str]]", keys)


def _modules_sent_to(copies: Iterable[Copy | Constant]) -> set[str]:
    return {cast("tuple[str, str]", copy.key)[0] for copy in copies if isinstance(copy, Copy)}


def _check_all_filled(
    tensors: Sequence[EngineTensor],
    copies: Iterable[Copy | Constant],
    whole: set[tuple[str, str]],
) -> None:
    filled: dict[object, int] = {}
    for copy in copies:
        filled[copy.key] = filled.get(copy.key, 0) + _numel(copy.target)
    wanting = [
        (tensor, filled.get((tensor.module, tensor.name), 0))
        for tensor in tensors
        if tensor.is_required and (tensor.module, tensor.name) not in whole
    ]
    missing = [
        f"{tensor.module}.{tensor.name} ({found} of {num_loadable(tensor.tensor)} elements)"
        for tensor, found in wanting
        if found < num_loadable(tensor.tensor)
    ]
    if missing:
        raise UnknownTensorError(
            f"{len(missing)} parameters of the engine would not be filled, such as {missing[0]}: "
            "do the senders publish all tensors, in checkpoint names?"
        )


def _regions_of(copy: Copy | Constant, senders: Layout) -> list[Region]:
    if isinstance(copy, Constant):
        return []
    return boxes_of_view(copy.source, senders.shape_of(copy.name), copy.target)


def _needed_boxes(
    copies: Sequence[Copy | Constant], regions: Sequence[Sequence[Region]]
) -> dict[str, list[Box]]:
    needed: dict[str, list[Box]] = {}
    for copy, parts in zip(copies, regions, strict=True):
        if isinstance(copy, Copy):
            needed.setdefault(copy.name, []).extend(region.box for region in parts)
    return {name: merge_overlapping(boxes) for name, boxes in needed.items()}


def _specs(
    senders: Layout, boxes: Mapping[str, Sequence[Box]], whole: Mapping[str, str]
) -> Iterator[ShardSpec]:
    for name, entry in senders.tensors.items():
        shape = senders.shape_of(name)
        wanted = [Box.full(shape)] if name in whole else boxes.get(name, ())
        for box in wanted:
            yield ShardSpec(name, shape, box, entry.dtype)


def _steps(
    copies: Sequence[Copy | Constant],
    regions: Sequence[Sequence[Region]],
    boxes: Mapping[str, Sequence[Box]],
    senders: Layout,
) -> dict[str, dict[str, tuple[Step | Fill, ...]]]:
    steps: dict[str, dict[str, tuple[Step | Fill, ...]]] = {}
    for copy, parts in zip(copies, regions, strict=True):
        module, name = cast("tuple[str, str]", copy.key)
        done = steps.setdefault(module, {}).setdefault(name, ())
        if isinstance(copy, Constant):
            steps[module][name] = (*done, Fill(copy.value, copy.target))
            continue
        shape = senders.shape_of(copy.name)
        for part in parts:
            box = next(box for box in boxes[copy.name] if box.contains(part.box))
            local = Region(box, part.source, part.target).local(shape)
            done = (*done, Step(copy.name, box, local, copy.casts, part.target))
        steps[module][name] = done
    return steps


def _view(parameter: Tensor, region: Strided) -> Tensor:
    offset = parameter.storage_offset() + region.offset
    return parameter.detach().as_strided(region.shape, region.strides, offset)


def _numel(region: Strided) -> int:
    return torch.Size(region.shape).numel()
