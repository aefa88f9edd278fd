"""A learner's state as named tensors: what a checkpoint holds, and how it is put back.

Names are those of the model's parameters, so that any layout finds its part again:
``model.<parameter>``, ``optimizer.<parameter>.<quantity>``, ``ema.<parameter>``,
``companion.<parameter>`` (its adapters alone, if it has any), ``rng.<device>_<rank>``, and counts:
``num_updates``, ``num_skipped``, ``num_skipped_in_a_row``. Optimizer quantities of parameters that
were never updated are not there. Of what adapters are added to, checkpoints have sums alone:
``base.<parameter>`` stands for ``model.<parameter>``.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from cosmos_parallel.errors import CheckpointError, CheckpointMismatchError
from cosmos_parallel.frozen_base import frozen_base
from cosmos_parallel.gradients import laid_out_like, local_part
from cosmos_parallel.learner import Learner
from cosmos_parallel.lora import moving_tensors
from cosmos_parallel.optimizer import (
    AdamW8bitConfig,
    AdamWConfig,
    KeepsOwnState,
    OptimizerConfig,
)
from cosmos_parallel.process import ProcessContext
from cosmos_parallel.sharding import model_tensors


def state_to_save(
    learner: Learner, process: ProcessContext, sums: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint; they are the learner's own, not copies.

    Args:
        learner: what is saved.
        process: of this rank.
        sums: of the frozen base, which stand for it.
    """
    left_out = {f"model.{name}" for name in sums}
    state = {n: value for n, value in state_of(learner, process).items() if n not in left_out}
    return state | {f"base.{name}": value for name, value in sums.items()}


def state_of(learner: Learner, process: ProcessContext) -> dict[str, Tensor]:
    """Return every tensor of the state; they are the learner's own, not copies."""
    state = weights_of(learner)
    keeper = learner.optimizer
    for name, parameter in learner.model.named_parameters():
        for quantity, value in learner.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                plain = keeper.plain(value) if isinstance(keeper, KeepsOwnState) else value
                state[f"optimizer.{name}.{quantity}"] = plain
            elif value is not None:
                raise CheckpointError(
                    f"optimizer state {quantity} of {name} is {type(value).__name__}, not a tensor"
                )
    return state | _counts(learner) | _rng_state(process)


def state_to_fill(
    learner: Learner, process: ProcessContext, saved: Mapping[str, STORAGE_TYPES], path: str
) -> dict[str, Tensor]:
    """Return tensors for everything that the checkpoint at ``path`` has for this rank.

    Those of the model are the learner's own; those of the optimizer are new, laid out like their
    parameters.

    Raises:
        CheckpointMismatchError: if a tensor of the model is missing there or has another shape, or
            another optimizer was at work.
    """
    # a checkpoint without averages begins them anew, at its weights
    state = {
        name: value
        for name, value in weights_of(learner).items()
        if not name.startswith("ema.") or name in saved
    }
    for name in frozen_base(learner.model):
        if f"model.{name}" not in saved and f"base.{name}" in saved:  # or from an earlier version
            del state[f"model.{name}"]
            state[f"base.{name}"] = torch.zeros(2, dtype=torch.int64)
    for name, value in state.items():
        found = saved.get(name)
        shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
        if shape != tuple(value.shape):
            offer = "has no such tensor" if shape is None else f"has {shape}"
            raise CheckpointMismatchError(
                f"checkpoint {path} is of another model: {name.removeprefix('model.')} needs "
                f"{tuple(value.shape)}, the checkpoint {offer}; a checkpoint goes on in the "
                "implementation (torchtitan's or transformers') and with the adapters it was "
                "written with"
            )
    _check_optimizer(learner, saved, path)
    parameters = dict(learner.model.named_parameters())
    for name, found in saved.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer" and isinstance(found, TensorStorageMetadata):
            state[name] = _optimizer_tensor(parameters.get(rest.rpartition(".")[0]), found)
    state["num_updates"] = torch.tensor(0)
    others = _counts(learner) | _rng_state(process)
    return state | {name: v for name, v in others.items() if name in saved}


def _check_optimizer(learner: Learner, saved: Iterable[str], path: str) -> None:
    """Check that what an optimizer kept is what the learner's keeps.

    Raises:
        CheckpointMismatchError: naming a parameter of which it is not.
    """
    found: dict[str, set[str]] = {}  # nothing of parameters that were never updated
    for name in saved:
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            parameter, _, quantity = rest.rpartition(".")
            found.setdefault(parameter, set()).add(quantity)
    trained = {n: p for n, p in learner.model.named_parameters() if p.requires_grad and n in found}
    if not trained:
        return
    for name, wanted in _kept_quantities(learner.optimizer_config, trained).items():
        if found[name] != wanted:
            raise CheckpointMismatchError(
                f"checkpoint {path} is of another optimizer: of {name} it has "
                f"{', '.join(sorted(found[name]))}, and {learner.optimizer_config.kind} keeps "
                f"{', '.join(sorted(wanted)) or 'nothing'}; go on with the optimizer it was "
                "written with, or begin another run from its exported weights"
            )


def _kept_quantities(
    config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]
) -> dict[str, set[str]]:
    """Return what an optimizer keeps of each parameter, by its names for them.

    It is asked by a step on parameters of one value each.
    """
    tiny = {name: nn.Parameter(torch.zeros([1] * p.ndim)) for name, p in parameters.items()}
    for parameter in tiny.values():
        parameter.grad = torch.zeros_like(parameter)
    # in 8 bits the same is kept, and on devices it would be compiled first
    optimizer = (AdamWConfig() if isinstance(config, AdamW8bitConfig) else config).build(tiny)
    optimizer.step()
    return {
        name: {q for q, v in optimizer.state[p].items() if isinstance(v, Tensor)}
        for name, p in tiny.items()
    }


def restore(learner: Learner, process: ProcessContext, state: Mapping[str, Tensor]) -> None:
    """Give a learner the optimizer state, RNG and position that were read.

    The model's tensors were filled in place.
    """
    keeper = learner.optimizer
    keeper.state.clear()
    parameters = dict(learner.model.named_parameters())
    for name, value in state.items():
        kind, _, rest = name.partition(".")
        parameter_name, _, quantity = rest.rpartition(".")
        if kind == "optimizer" and parameter_name in parameters:
            parameter = parameters[parameter_name]
            own = (
                keeper.own(parameter, quantity, value)
                if isinstance(keeper, KeepsOwnState)
                else value
            )
            learner.optimizer.state[parameter][quantity] = own
    _place_step_counts(learner.optimizer)
    learner.num_updates = int(state["num_updates"])
    # checkpoints of earlier versions do not say what was skipped
    learner.num_skipped = int(state.get("num_skipped", 0))
    learner.num_skipped_in_a_row = int(state.get("num_skipped_in_a_row", 0))
    if learner.ema is not None and not any(name.startswith("ema.") for name in state):
        learner.ema.restart()
    if f"rng.cpu_{process.rank}" in state:
        torch.set_rng_state(state[f"rng.cpu_{process.rank}"])
    if f"rng.cuda_{process.rank}" in state:
        torch.cuda.set_rng_state(state[f"rng.cuda_{process.rank}"])


def saved_sums(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of the frozen base in the state of a checkpoint."""
    return {
        name.removeprefix("base."): value
        for name, value in state.items()
        if name.startswith("base.")
    }


def parts_of(learner: Learner, process: ProcessContext) -> dict[str, Tensor]:
    """Return what this rank holds of the state, without the random state; not copies."""
    return {
        name: local_part(value)
        for name, value in state_of(learner, process).items()
        if not name.startswith("rng.")
    }


def put_parts(learner: Learner, process: ProcessContext, parts: Mapping[str, Tensor]) -> None:
    """Put what `parts_of` gave in place of a learner's state; it has the same layout.

    Parts of the optimizer's are kept as they are, on the device where they are.
    """
    for name, value in weights_of(learner).items():
        local_part(value).copy_(parts[name])
    parameters = dict(learner.model.named_parameters())
    state: dict[str, Tensor] = {}
    for name, part in parts.items():
        parameter = parameters.get(name.removeprefix("optimizer.").rpartition(".")[0])
        state[name] = part if parameter is None else _as_kept(parameter, part)
    restore(learner, process, state)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    """Return the tensors of the models and the averages of them; they are the learner's own."""
    averages = learner.ema.averages if learner.ema is not None else {}
    beside = moving_tensors(learner.companion) if learner.companion is not None else {}
    parts = {"model": model_tensors(learner.model), "ema": averages, "companion": beside}
    return {
        f"{part}.{name}": value for part, named in parts.items() for name, value in named.items()
    }


def _counts(learner: Learner) -> dict[str, Tensor]:
    return {
        "num_updates": torch.tensor(learner.num_updates),
        "num_skipped": torch.tensor(learner.num_skipped),
        "num_skipped_in_a_row": torch.tensor(learner.num_skipped_in_a_row),
    }


def _place_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Put the step counts of kernels that look for them on the device there, from the host."""
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            kept = optimizer.state.get(parameter, {})
            if isinstance(kept.get("step"), Tensor):
                kept["step"] = kept["step"].to(parameter.device)


def _as_kept(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a quantity of the optimizer, which is divided as its parameter or not at all."""
    return laid_out_like(parameter, part) if part.shape == local_part(parameter).shape else part


def _rng_state(process: ProcessContext) -> dict[str, Tensor]:
    state = {f"rng.cpu_{process.rank}": torch.get_rng_state()}
    if process.device_type == "cuda":
        state[f"rng.cuda_{process.rank}"] = torch.cuda.get_rng_state()
    return state


def _optimizer_tensor(parameter: Tensor | None, saved: TensorStorageMetadata) -> Tensor:
    if parameter is not None and tuple(parameter.shape) == tuple(saved.size):
        return torch.zeros_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    return torch.zeros(saved.size, dtype=saved.properties.dtype)
