"""The frozen base of a model with adapters: a checkpoint has its sums instead of its weights.

It is in the files that the run started from, and sums say whether these are the same: of the bits
as whole numbers, which add up to the same whatever the layout.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cosmos_parallel.errors import CheckpointMismatchError
from cosmos_parallel.gradients import local_part, num_copies
from cosmos_parallel.lora import has_adapters
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.sharding import model_tensors

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
_LOW_BITS = 0xFFFF
_PRIME = 2**31 - 1  # sums are taken modulo this, so that those of all ranks add up exactly


def frozen_base(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen weights that adapters are added to; none of a model without adapters.

    Names are the model's own, as of ``model_tensors``.
    """
    if not has_adapters(model):
        return {}
    tensors = model_tensors(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {
        name: value for name, value in tensors.items() if name in frozen and ".lora_" not in name
    }


def base_sums(base: Mapping[str, Tensor], mesh: TrainingMesh) -> dict[str, Tensor]:
    """Return two int64 sums of each tensor's bits; every rank of the replica calls.

    Args:
        base: of this rank's stages; there is one on every rank or on none.
        mesh: the ranks that hold the model.
    """
    if not base:
        return {}
    parts = torch.stack([_sums(local_part(tensor)).cpu() for tensor in base.values()])
    # one after the other, as stages have tensors of their own
    most = mesh.max_(torch.tensor(len(parts), device=mesh.process.device))
    table = torch.zeros(mesh.config.pp, int(most), 2, dtype=torch.int64, device=most.device)
    stage = mesh.process.rank // mesh.ranks_per_stage
    table[stage, : len(parts)] = parts.to(most.device)
    totals = mesh.sum_(table)[stage, : len(parts)].cpu()
    return {
        name: total // num_copies(tensor, mesh.ranks_per_stage) % _PRIME
        for (name, tensor), total in zip(base.items(), totals, strict=True)
    }


def check_base(sums: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: str) -> None:
    """Compare the sums of a frozen base with those in the checkpoint at ``path``.

    Raises:
        CheckpointMismatchError: if it is another.
    """
    others = [name for name, value in saved.items() if not torch.equal(value, sums[name])]
    if others:
        raise CheckpointMismatchError(
            f"checkpoint {path} is of adapters on another model: {others[0]} has other values "
            f"({len(others)} of {len(saved)} frozen tensors have); load the model, in the type, "
            "that the run started from"
        )


def _sums(part: Tensor) -> Tensor:
    bits = part.contiguous().flatten().view(_WHOLE_NUMBERS[part.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        whole = chunk.to(torch.int64)
        sums += torch.stack([whole.sum(), (whole & _LOW_BITS).square().sum()])
        sums %= _PRIME
    return sums
