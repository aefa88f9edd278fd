"""What the weight-sync benchmark compares, each as the steps that it consists of.

An arm lives in every process. `prepare` is not timed and makes the memory and the connections;
`steps` are the timed parts, in which all processes take part at the same time.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from weightsync_model import (
    NUM_SENDERS,
    Size,
    Trained,
    carve,
    wanted_specs,
)

from cosmos_weightsync import ReceiverConfig, SenderConfig, WeightReceiver, WeightSender, shards_of

Steps = dict[str, Callable[[], None]]


@dataclass(kw_only=True)
class Place:
    """What a process has: its rank, and the model or the memory that wants it."""

    size: Size
    rank: int
    senders: dist.ProcessGroup
    receivers: dist.ProcessGroup
    mesh: DeviceMesh
    broadcast: dist.ProcessGroup
    model: Trained | None
    flat: Tensor | None

    @property
    def receiver_rank(self) -> int:
        return self.rank - NUM_SENDERS

    @property
    def targets(self) -> dict[str, Tensor]:
        """What the baselines fill, as a tensor-parallel worker holds it."""
        assert self.flat is not None
        return carve(self.flat, wanted_specs(self.size, self.receiver_rank))


class Arm(Protocol):
    """One row of the table."""

    name: str

    def prepare(self) -> None: ...

    def steps(self, turn: int) -> Steps: ...

    def arrived(self) -> dict[str, Tensor] | None: ...

    def finish(self) -> None: ...


def nothing() -> None:
    """What a process does that has no part in a step."""


class Ours:
    """`publish` at every sender, then `stage` at every receiver, digests included."""

    def __init__(self, place: Place, transport: str, versions: "Versions") -> None:
        self.name = transport
        self._place = place
        self._versions = versions
        self._receiver: WeightReceiver | None = None
        self._sender: WeightSender | None = None

    def prepare(self) -> None:
        """Senders of its own: the snapshots of one arm are gone when the next one works."""
        place = self._place
        if place.model is not None:
            memory = "private" if self.name == "cross_memory" else "shared"
            self._sender = WeightSender(
                shards_of(place.model.named_tensors()),
                rank=place.rank,
                num_ranks=NUM_SENDERS,
                config=SenderConfig(snapshot_memory=memory),
            )
        endpoints: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(endpoints, None if self._sender is None else self._sender.endpoint)
        if place.model is None:
            specs = wanted_specs(place.size, place.receiver_rank)
            config = ReceiverConfig(transport=self.name)
            self._receiver = WeightReceiver(endpoints[:NUM_SENDERS], wanted=specs, config=config)

    def steps(self, turn: int) -> Steps:
        sender, receiver, version = self._sender, self._receiver, self._versions.next()
        if sender is not None:
            return {"publish": lambda: sender.publish(version), "pull": nothing}
        assert receiver is not None
        return {"publish": nothing, "pull": lambda: _stage(receiver, version)}

    def arrived(self) -> dict[str, Tensor] | None:
        if self._receiver is None:
            return None
        return {shard.spec.name: shard.tensor for shard in self._receiver.staged_shards()}

    def finish(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def _stage(receiver: WeightReceiver, version: int) -> None:
    receiver.stage(version)


class Versions:
    """Numbers that grow, the same in every process."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class Memcpy:
    """The bound: each receiver copies as many bytes as it wants, in one stretch, once."""

    name = "memcpy"

    def __init__(self, place: Place) -> None:
        self._place = place
        self._copy: Tensor | None = None

    def prepare(self) -> None:
        if self._place.flat is not None:
            self._copy = torch.zeros_like(self._place.flat)

    def steps(self, turn: int) -> Steps:
        copy, flat = self._copy, self._place.flat
        if copy is None or flat is None:
            return {"pull": nothing}
        return {"pull": lambda: _copy(copy, flat)}

    def arrived(self) -> dict[str, Tensor] | None:
        return None

    def finish(self) -> None:
        self._copy = None


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


class GatherBroadcast:
    """What most trainers do: per parameter `full_tensor()`, then a broadcast from rank 0."""

    name = "full_tensor + broadcast"

    def __init__(self, place: Place) -> None:
        self._place = place

    def prepare(self) -> None: ...

    def steps(self, turn: int) -> Steps:
        return {"pull": self._send if self._place.model is not None else self._receive}

    def _send(self) -> None:
        assert self._place.model is not None
        for _, parameter in self._place.model.named_tensors():
            full = parameter.full_tensor().detach()
            if self._place.rank == 0:
                dist.broadcast(full, 0, group=self._place.broadcast)

    def _receive(self) -> None:
        targets = self._place.targets
        specs = wanted_specs(self._place.size, self._place.receiver_rank)
        largest = max(torch.Size(spec.global_shape).numel() for spec in specs)
        buffer = torch.empty(largest, dtype=torch.bfloat16)
        for spec in specs:
            full = buffer[: torch.Size(spec.global_shape).numel()].view(spec.global_shape)
            dist.broadcast(full, 0, group=self._place.broadcast)
            box = tuple(slice(a, b) for a, b in zip(spec.box.start, spec.box.stop, strict=True))
            targets[spec.name].copy_(full[box])

    def arrived(self) -> dict[str, Tensor] | None:
        return None if self._place.flat is None else self._place.targets

    def finish(self) -> None: ...


class Checkpoint:
    """torch.distributed.checkpoint, saved to and loaded from a RAM disk."""

    name = "torch.distributed.checkpoint"

    def __init__(self, place: Place) -> None:
        self._place = place
        self._folder = Path("/dev/shm/cosmos-weightsync-benchmark")

    def prepare(self) -> None: ...

    def steps(self, turn: int) -> Steps:
        is_sender = self._place.model is not None
        return {
            "publish": self._save if is_sender else nothing,
            "pull": nothing if is_sender else self._load,
        }

    def _save(self) -> None:
        assert self._place.model is not None
        state = {name: value.detach() for name, value in self._place.model.named_tensors()}
        writer = dcp.FileSystemWriter(self._folder, overwrite=True)
        dcp.save(state, storage_writer=writer, process_group=self._place.senders)

    def _load(self) -> None:
        targets, whole = self._place.targets, self._place.size.shapes()
        state: dict[str, Any] = {}
        for name, target in targets.items():
            cut = [d for d, size in enumerate(target.shape) if size != whole[name][d]]
            placement = Shard(cut[0]) if cut else Replicate()
            state[name] = DTensor.from_local(target, self._place.mesh, [placement], run_check=False)
        dcp.load(state, checkpoint_id=self._folder, process_group=self._place.receivers)

    def arrived(self) -> dict[str, Tensor] | None:
        return None if self._place.flat is None else self._place.targets

    def finish(self) -> None:
        if self._place.rank == 0:
            with suppress(FileNotFoundError):
                shutil.rmtree(self._folder)


def own_arms(place: Place, transports: Sequence[str]) -> list[Arm]:
    """The rows that need nothing but this package and torch."""
    versions = Versions()
    return [
        Memcpy(place),
        *(Ours(place, name, versions) for name in transports),
        GatherBroadcast(place),
        Checkpoint(place),
    ]
