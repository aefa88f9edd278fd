"""A linear layer from a language model's last hidden states to one number, for critics and rewards.

It is a child of the model, hence it is sharded, trained and saved with it, but it is no part of
the language model: exports and weight senders leave it out.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cosmos_parallel.errors import MeshError
from cosmos_parallel.mesh import ParallelConfig
from cosmos_parallel.sharding import model_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VALUE_HEAD = "value_head"


def require_value_head_fits(parallel: ParallelConfig) -> None:
    """Refuse layouts in which no rank sees a token's whole hidden state, or only some tokens.

    Raises:
        MeshError: naming the axis.
    """
    for axis, degree in (("tp", parallel.tp), ("cp", parallel.cp), ("pp", parallel.pp)):
        if degree > 1:
            raise MeshError(
                f"{axis} is {degree}, but a value head is trained with whole hidden states: use "
                "dp_replicate and dp_shard alone"
            )


def add_value_head(model: "PreTrainedModel") -> None:
    """Give a model a value head, in place; it has no values before ``start_value_head``.

    Args:
        model: not sharded by FSDP2 yet; with adapters, if it is to have any.
    """
    embedding = model.get_input_embeddings().weight
    head = nn.Linear(
        model.config.get_text_config().hidden_size,
        1,
        bias=False,
        dtype=embedding.dtype,
        device=embedding.device,
    )
    model.add_module(VALUE_HEAD, head)


@torch.no_grad()
def start_value_head(model: nn.Module) -> None:
    """Let every value be 0 at first."""
    for name, parameter in model.named_parameters():
        if is_of_value_head(name):
            parameter.zero_()


def is_of_value_head(name: str) -> bool:
    """Whether a tensor of a model belongs to its value head."""
    return name.startswith(f"{VALUE_HEAD}.")


def language_model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what `model_tensors` has, without the value head."""
    for name, value in model_tensors(model).items():
        if not is_of_value_head(name):
            yield name, value
