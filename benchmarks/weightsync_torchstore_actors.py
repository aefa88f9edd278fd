"""The actors of torchstore's arm of the weight-sync benchmark, in a module that each can import.

torchstore 0.1.2 wants Monarch 0.1.2, which loads only where CUDA is. Later ones refuse its
controller, whose endpoints are in part coroutines and in part not; here all of them are.
"""

import inspect
import os

import torch
import torch.distributed as dist
import torchstore
from measure import forget_peak, status_mib
from monarch.actor import Actor, current_rank, endpoint
from torch.distributed.device_mesh import DeviceMesh
from torchstore.controller import Controller
from torchstore.transport.pipe import TensorSlice
from weightsync_model import NUM_SENDERS, Size, Trained, carve, wanted_specs, whole_values

from cosmos_weightsync import Box

_KEY = "model"


def _as_coroutine(name: str):
    method = vars(Controller)[name]._method

    async def called(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    called.__name__ = name
    return endpoint(called)


class AsyncController(Controller):
    """torchstore's, whose answers are coroutines."""


for _name, _found in list(vars(Controller).items()):
    _method = getattr(_found, "_method", None)
    if _method is not None and not inspect.iscoroutinefunction(_method):
        setattr(AsyncController, _name, _as_coroutine(_name))
torchstore.api.Controller = AsyncController


class Member(Actor):
    """One process, and how far its memory grew."""

    def __init__(self, size: Size) -> None:
        torch.set_num_threads(1)
        self.size = size
        self.before_mib = 0.0

    @endpoint
    async def start_turn(self) -> None:
        self.before_mib = forget_peak()

    @endpoint
    async def grown_mib(self) -> float:
        return status_mib("VmHWM") - self.before_mib


class Sender(Member):
    """A trainer's rank."""

    def __init__(self, size: Size, store: str) -> None:
        super().__init__(size)
        rank = current_rank().rank
        os.environ["LOCAL_RANK"] = str(rank)  # chooses this process's own volume
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NUM_SENDERS)
        self.model = Trained(size, DeviceMesh("cpu", list(range(NUM_SENDERS))))

    @endpoint
    async def put(self) -> None:
        await torchstore.put_state_dict(dict(self.model.named_tensors()), _KEY)


class Receiver(Member):
    """A worker of an engine."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.rank = current_rank().rank
        self.specs = wanted_specs(size, self.rank)
        flat = torch.zeros(sum(spec.box.numel for spec in self.specs), dtype=torch.bfloat16)
        self.targets = carve(flat, self.specs)

    @endpoint
    async def get(self) -> None:
        for spec in self.specs:
            wanted = TensorSlice(
                offsets=tuple(spec.box.start),
                coordinates=(),
                global_shape=torch.Size(spec.global_shape),
                local_shape=torch.Size(spec.box.shape),
                mesh_shape=(),
            )
            await torchstore.get(f"{_KEY}/{spec.name}", self.targets[spec.name], wanted)

    @endpoint
    async def wrong(self) -> list[str]:
        """Names of tensors that are not what the senders hold."""
        return [
            spec.name
            for spec, (name, whole) in zip(self.specs, whole_values(self.size), strict=True)
            if not torch.equal(
                self.targets[name], whole[spec.box.relative_to(Box.full(whole.shape))]
            )
        ]
