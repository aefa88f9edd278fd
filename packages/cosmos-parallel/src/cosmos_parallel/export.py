"""Export to Hugging Face form: safetensors, config and tokenizer, which ``transformers`` loads."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_parallel.errors import ExportError
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.models import DtypeName, quiet_transformers
from cosmos_parallel.sharding import model_tensors

if TYPE_CHECKING:
    from cosmos_parallel.models import CausalLM

# what a directory may hold besides weights and config
_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "*.tiktoken",
)


@runtime_checkable
class HasHfNames(Protocol):
    """A model whose own names are not those of its checkpoint."""

    def to_hf(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Rename tensors given by the names of ``state_dict``, and cut up those that are several.

        Args:
            tensors: some or all of the model's, each whole, or on the meta device.
        """
        ...


def export_hf(
    model: "CausalLM",
    directory: Path,
    mesh: TrainingMesh,
    *,
    tokenizer_dir: Path | None = None,
    dtype: DtypeName | None = None,
    max_shard_gb: float = 5.0,
) -> None:
    """Write the model as ``save_pretrained`` would; every rank calls, rank 0 writes.

    Tensors are gathered one at a time and kept in host memory of rank 0 only. The directory
    appears whole or not at all, and replaces one that is there.

    Args:
        model: from ``load_causal_lm``, or any transformers model.
        directory: where to; its parent is made.
        mesh: the ranks that hold the model.
        tokenizer_dir: the tokenizer's files are copied from here, as they are.
        dtype: floating-point tensors are cast to this; ``None`` keeps theirs.
        max_shard_gb: a model larger than this is cut into files of at most this, with an index.

    Raises:
        ExportError: on every rank, if the directory cannot be written.
    """
    target = getattr(torch, dtype) if dtype else None
    tensors = _gather(model, mesh, target)
    failure: Exception | None = None
    if mesh.process.rank == 0:
        try:
            _write(model, tensors, directory, tokenizer_dir, round(max_shard_gb * 1e9))
        except OSError as error:
            failure = error
    failed = torch.tensor(int(failure is not None), device=mesh.process.device)
    if mesh.max_(failed).item():
        cause = failure or "rank 0 says why"
        raise ExportError(f"cannot export to {directory}: {cause}") from failure


def _gather(model: "CausalLM", mesh: TrainingMesh, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return whole tensors on rank 0, stage after stage, and nothing elsewhere."""
    own = model_tensors(model)
    described = [(name, tuple(value.shape), value.dtype) for name, value in own.items()]
    stages: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [described]
    if mesh.config.pp > 1:
        everyone: list[Any] = [None] * mesh.process.world_size
        dist.all_gather_object(everyone, described)
        stages = everyone[:: mesh.ranks_per_stage]
    rank = mesh.process.rank
    tensors: dict[str, Tensor] = {}
    for stage, described in enumerate(stages):
        first = stage * mesh.ranks_per_stage
        for name, shape, kind in described:
            target = dtype if dtype is not None and kind.is_floating_point else kind
            if rank // mesh.ranks_per_stage == stage:
                value = own[name]
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if rank == first == 0:
                    tensors[name] = whole.to("cpu", target)
                elif rank == first:
                    dist.send(whole.to("cpu", target).contiguous(), 0)
            elif rank == 0:
                tensors[name] = torch.empty(shape, dtype=target)
                dist.recv(tensors[name], first)
    return tensors


def _write(
    model: "CausalLM",
    tensors: dict[str, Tensor],
    directory: Path,
    tokenizer_dir: Path | None,
    max_shard_bytes: int,
) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        writing = Path(scratch) / "new"
        first = next(value for value in tensors.values() if value.is_floating_point())
        if isinstance(model, HasHfNames):
            renamed = {name: part.clone() for name, part in model.to_hf(tensors).items()}
            model.config.save_pretrained(writing)
            save_torch_state_dict(renamed, writing, max_shard_size=max_shard_bytes)
        else:
            with quiet_transformers():
                model.save_pretrained(
                    writing, state_dict=dict(tensors), max_shard_size=max_shard_bytes
                )
        config = json.loads((writing / "config.json").read_text())
        config["dtype"] = str(first.dtype).removeprefix("torch.")
        (writing / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if tokenizer_dir is not None:
            _copy_tokenizer(tokenizer_dir, writing)
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        writing.rename(directory)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in _TOKENIZER_PATTERNS:
        for file in source.glob(pattern):
            shutil.copy2(file, target / file.name)
