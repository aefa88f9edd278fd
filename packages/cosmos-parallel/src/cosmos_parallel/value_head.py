"""A linear layer from a language model's last hidden states to one number, for critics and rewards.

It is a child of the model, hence it is sharded, trained and saved with it, but it is no part of
the language model: exports and weight senders leave it out. Of a pipeline the last stage has it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_parallel.errors import MeshError
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.sharding import model_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VALUE_HEAD = "value_head"


class ValueHeadElsewhere(nn.Module):
    """Stands for a value head that another rank has; losses only look whether there is one."""

    def forward(self, hidden: Tensor) -> NoReturn:
        """Refuse: hidden states are where the head is."""
        raise MeshError(f"hidden states {tuple(hidden.shape)} came to a rank without a value head")


def make_value_head(width: int, dtype: torch.dtype, device: torch.device | str) -> nn.Linear:
    """Return a value head that has no values before ``start_value_head``.

    Args:
        width: of hidden states.
        dtype: of its parameters.
        device: where they are.
    """
    return nn.Linear(width, 1, bias=False, dtype=dtype, device=device)


def add_value_head(model: "PreTrainedModel") -> None:
    """Give a model a value head, in place; it has no values before ``start_value_head``.

    Args:
        model: not sharded by FSDP2 yet; with adapters, if it is to have any.
    """
    embedding = next(model.get_input_embeddings().parameters())
    width = model.config.get_text_config().hidden_size
    model.add_module(VALUE_HEAD, make_value_head(width, embedding.dtype, embedding.device))


@torch.no_grad()
def start_value_head(model: nn.Module) -> None:
    """Let every value be 0 at first."""
    for name, parameter in model.named_parameters():
        if is_of_value_head(name):
            parameter.zero_()


def whole_value_head(model: nn.Module, mesh: TrainingMesh) -> Tensor:
    """Return the weights of a value head on every rank, ``[1, width]`` in float64; all ranks call.

    Args:
        model: with a value head, on whichever ranks.
        mesh: the ranks that hold the model.
    """
    config: Any = model.config  # of any Hugging Face model
    width = int(config.get_text_config().hidden_size)
    found = torch.zeros(1, width + 1, dtype=torch.float64, device=mesh.process.device)
    for weight in model.get_submodule(VALUE_HEAD).parameters():
        value = weight.detach()
        found[:, :width] = value.full_tensor() if isinstance(value, DTensor) else value
        found[:, width:] = 1.0  # to count the ranks that have it
    mesh.sum_(found)
    return found[:, :width] / found[:, width:]


def is_of_value_head(name: str) -> bool:
    """Whether a tensor of a model belongs to its value head."""
    return name.startswith(f"{VALUE_HEAD}.")


def language_model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what `model_tensors` has, without the value head."""
    for name, value in model_tensors(model).items():
        if not is_of_value_head(name):
            yield name, value
