"""Export to Hugging Face form: safetensors, config and tokenizer, which ``transformers`` loads."""

import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from cosmos_parallel.errors import ExportError
from cosmos_parallel.export_files import FilePlan, file_names, plan_files
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.models import DtypeName, quiet_transformers
from cosmos_parallel.stage_gathering import everyone, gather_to, places_of_all
from cosmos_parallel.tensor_files import save_tensors
from cosmos_parallel.value_head import language_model_tensors

if TYPE_CHECKING:
    from cosmos_parallel.models import CausalLM

# by the number of a plan, the bytes of every tensor in each of its files
_Written = dict[int, list[dict[str, int]]]
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
    "*.model",  # of SentencePiece
)
_GENERATION = "generation_config.json"


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
    directory: Path | str,
    mesh: TrainingMesh,
    *,
    tokenizer_dir: Path | None = None,
    dtype: DtypeName | None = None,
    max_shard_gb: float = 5.0,
) -> None:
    """Write the model as ``save_pretrained`` would; every rank calls, ranks write files in turn.

    Tensors are gathered one at a time, and a rank keeps in host memory those of the file that it
    writes next. The directory appears whole or not at all, and replaces one that is there. A model
    that takes several files must go where all ranks see it.

    Args:
        model: from ``load_causal_lm``, or any transformers model.
        directory: where to; its parent is made.
        mesh: the ranks that hold the model.
        tokenizer_dir: the tokenizer's files are copied from here, as they are, and with them how
            the model generates and what ends an answer, where the model does not know it.
        dtype: floating-point tensors are cast to this; ``None`` keeps theirs.
        max_shard_gb: a model larger than this is cut into files of at most this, with an index.

    Raises:
        ExportError: on every rank, if the directory cannot be written, or the model is not one of
            transformers.
    """
    directory = Path(directory)
    if not hasattr(model, "config"):
        raise ExportError(
            f"{type(model).__name__} is no model of transformers, so there is no Hugging Face form "
            "of it; save its state_dict with safetensors instead"
        )
    scratch = directory.parent / f".{directory.name}-exporting"
    is_first, max_bytes = mesh.process.rank == 0, round(max_shard_gb * 1e9)
    plans = _plan(model, mesh, getattr(torch, dtype) if dtype else None, max_bytes)
    try:
        with _telling(mesh, directory):
            if is_first:
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(parents=True)
        with _telling(mesh, directory), ThreadPoolExecutor(max_workers=1) as writing:
            mine = _Export(model, mesh, scratch, max_bytes).write(plans, writing)
        written = {number: files for part in everyone(mesh, mine) for number, files in part.items()}
        with _telling(mesh, directory):
            if is_first:
                complete = _finish(model, scratch, written, _float_type(plans))
                if tokenizer_dir is not None:
                    _copy_tokenizer(tokenizer_dir, complete)
                if directory.exists():
                    directory.rename(scratch / "old")
                complete.rename(directory)
    finally:
        if is_first:
            shutil.rmtree(scratch, ignore_errors=True)


def _float_type(plans: Sequence[FilePlan]) -> torch.dtype:
    kinds = (place.dtype for plan in plans for place in plan.tensors)
    return next(kind for kind in kinds if kind.is_floating_point)


@contextmanager
def _telling(mesh: TrainingMesh, directory: Path) -> Generator[None]:
    """Let a failure of one rank to write be an error on all; every rank enters and leaves.

    Raises:
        ExportError: on every rank.
    """
    failure: OSError | None = None
    try:
        yield
    except OSError as error:
        failure = error
    failed = torch.tensor(int(failure is not None), device=mesh.process.device)
    if mesh.max_(failed).item():
        cause = failure or "another rank says why"
        raise ExportError(f"cannot export to {directory}: {cause}") from failure


def _plan(
    model: "CausalLM", mesh: TrainingMesh, dtype: torch.dtype | None, max_bytes: int
) -> list[FilePlan]:
    places = places_of_all(_exported_tensors(model), mesh, dtype)
    return plan_files(places, max_bytes=max_bytes, ranks_per_stage=mesh.ranks_per_stage)


def _exported_tensors(model: "CausalLM") -> dict[str, Tensor]:
    ignored: set[str] = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: value for name, value in language_model_tensors(model) if name not in ignored}


class _Export:
    """This rank's part of the writing."""

    def __init__(
        self, model: "CausalLM", mesh: TrainingMesh, scratch: Path, max_bytes: int
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._scratch = scratch
        self._max_bytes = max_bytes
        self._own = _exported_tensors(model)

    def write(self, plans: Sequence[FilePlan], writing: ThreadPoolExecutor) -> _Written:
        """Gather everything, and write this rank's files while others gather theirs.

        A file that cannot be written is an error at the end: others wait for this rank's parts.
        """
        futures: dict[int, Future[list[dict[str, int]]]] = {}
        for number, plan in enumerate(plans):
            is_mine = plan.writer == self._mesh.process.rank
            if is_mine:
                wait(futures.values())  # the file before is out of memory then
            gathered = [
                (place.name, gather_to(plan.writer, place, self._own, self._mesh))
                for place in plan.tensors
            ]
            if is_mine:
                whole = {name: value for name, value in gathered if value is not None}
                futures[number] = writing.submit(self._write, number, whole)
        return {number: future.result() for number, future in futures.items()}

    def _write(self, number: int, tensors: dict[str, Tensor]) -> list[dict[str, int]]:
        """Write the tensors of a plan under the names of files; return their bytes by name."""
        if isinstance(self._model, HasHfNames):
            renamed = self._model.to_hf(tensors)
        else:
            from transformers.core_model_loading import revert_weight_conversion

            loaded: Any = self._model  # of transformers, or its stages, which are asked alike
            renamed = revert_weight_conversion(loaded, tensors)
        split = split_torch_state_dict_into_shards(renamed, max_shard_size=self._max_bytes)
        files: list[dict[str, int]] = []
        for index, names in enumerate(split.filename_to_tensors.values()):
            part = {name: _by_itself(renamed[name]) for name in names}
            save_tensors(part, self._scratch / f"{number}-{index}", {"format": "pt"})
            files.append({name: value.nbytes for name, value in part.items()})
        return files


def _by_itself(value: Tensor) -> Tensor:
    """Return a tensor that shares no memory with others, as tensors of a file must not."""
    is_alone = value.untyped_storage().nbytes() == value.nbytes
    return value if is_alone and value.is_contiguous() else value.contiguous().clone()


def _finish(model: "CausalLM", scratch: Path, written: _Written, dtype: torch.dtype) -> Path:
    """Give the files their names, and write what else belongs to a model; return where it is."""
    complete = scratch / "new"
    if isinstance(model, HasHfNames):
        model.config.save_pretrained(complete)
    else:
        with quiet_transformers():
            model.save_pretrained(complete, state_dict={})
    config = json.loads((complete / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (complete / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(file_names([len(written[key]) for key in sorted(written)])):
        for index, (name, tensors) in enumerate(zip(names, written[number], strict=True)):
            source = scratch / f"{number}-{index}"
            if not source.is_file():
                raise FileNotFoundError(
                    f"{source}, written by another rank, is not seen by rank 0: a model of several "
                    "files needs a directory that all ranks share"
                )
            source.rename(complete / name)
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(tensors.values())
    if len(set(weight_map.values())) > 1:
        index_ = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (complete / "model.safetensors.index.json").write_text(json.dumps(index_, indent=2) + "\n")
    return complete


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in _TOKENIZER_PATTERNS:
        for file in source.glob(pattern):
            shutil.copy2(file, target / file.name)
    if (source / _GENERATION).is_file() and not (target / _GENERATION).exists():
        shutil.copy2(source / _GENERATION, target / _GENERATION)
