"""A learner's whole state from one replica to another, rank by rank, over their own connection.

Both have the same layout, so rank r of the one holds what rank r of the other needs: no tensor is
gathered. First goes a list of what follows (names, types, local shapes), then the tensors.
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from cosmos_parallel.errors import ReplicaLostError
from cosmos_parallel.gradients import local_part
from cosmos_parallel.learner import Learner
from cosmos_parallel.learner_state import parts_of, put_parts, weights_of
from cosmos_parallel.replicas import StoreReplicaGroup


def send_state(learner: Learner, group: StoreReplicaGroup, index: int) -> None:
    """Send model, optimizer and schedule to the same rank of another member.

    Raises:
        ReplicaLostError: if it did not take them in time.
    """
    process = learner.mesh.process
    parts = {name: part.contiguous() for name, part in parts_of(learner, process).items()}
    listed = [
        [name, _dtype_name(part), list(part.shape), part.device.type]
        for name, part in parts.items()
    ]
    header = torch.frombuffer(bytearray(json.dumps(listed).encode()), dtype=torch.uint8)
    length = torch.tensor([len(header)])
    # everything goes over the device of the group, small tensors of the host too
    group.send([length.to(process.device), header.to(process.device)], index)
    group.send([part.to(process.device) for part in parts.values() if part.numel()], index)


def receive_state(learner: Learner, group: StoreReplicaGroup, index: int) -> None:
    """Put what ``send_state`` of another member sends in place of this learner's state.

    Raises:
        ReplicaLostError: if it did not send in time, or sent the state of another model. The
            learner must then not be used.
    """
    process = learner.mesh.process
    length = torch.zeros(1, dtype=torch.int64, device=process.device)
    group.receive([length], index)
    header = torch.zeros(int(length), dtype=torch.uint8, device=process.device)
    group.receive([header], index)
    listed = json.loads(header.cpu().numpy().tobytes())
    parts = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=process.device)
        for name, dtype, shape, _ in listed
    }
    group.receive([part for part in parts.values() if part.numel()], index)
    on_host = {name for name, *_, device_type in listed if device_type == "cpu"}
    _check(learner, parts)
    parts = {name: p.cpu() if name in on_host else p for name, p in parts.items()}
    put_parts(learner, process, parts)


def _check(learner: Learner, parts: Mapping[str, Tensor]) -> None:
    for name, value in weights_of(learner).items():
        part, mine = parts.get(name), local_part(value)
        if part is None or part.shape != mine.shape:
            found = "nothing" if part is None else tuple(part.shape)
            raise ReplicaLostError(
                f"the other replica has another model: {name} needs "
                f"{tuple(mine.shape)} on this rank, it sent {found}"
            )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
