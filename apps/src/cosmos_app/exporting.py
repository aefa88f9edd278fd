"""What a run leaves behind: a Hugging Face model, and the adapter where one was trained."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cosmos_parallel import (
    AdapterError,
    ExportError,
    TrainingMesh,
    export_hf,
    export_lora,
    merge_directories,
)
from cosmos_parallel import ModelConfig as HeldModelConfig

if TYPE_CHECKING:
    from cosmos_parallel.models import CausalLM, DtypeName

ADAPTER_FOLDER = "adapter"


def export_trained(
    model: "CausalLM",
    directory: Path,
    mesh: TrainingMesh,
    *,
    base: Path,
    training: HeldModelConfig,
    dtype: "DtypeName | None" = None,
) -> None:
    """Write what was trained as a model that transformers and vLLM load; every rank calls.

    With adapters it is the base with the adapter added, as large as the base and in its dtype, and
    the adapter alone is in its folder ``adapter``, for peft.

    Args:
        model: as it was loaded.
        directory: where to.
        mesh: the ranks that hold it.
        base: the model directory that training started from.
        training: how it was loaded.
        dtype: of a model without adapters; ``None`` keeps that of training.

    Raises:
        ExportError: on every rank, if it cannot be written.
    """
    if training.lora is None:
        export_hf(model, directory, mesh, tokenizer_dir=base, dtype=dtype)
        return
    alone = directory.with_name(f".{directory.name}-{ADAPTER_FOLDER}")
    export_lora(model, alone, mesh, base=base)
    failure: Exception | None = None
    if mesh.process.rank == 0:
        try:
            merge_directories(base, alone, directory)
            alone.rename(directory / ADAPTER_FOLDER)
        except (OSError, AdapterError) as error:
            failure = error
    failed = torch.tensor(int(failure is not None), device=mesh.process.device)
    if mesh.max_(failed).item():
        raise ExportError(f"cannot export to {directory}: {failure or 'rank 0 says why'}")
