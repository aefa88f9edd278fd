"""A trained reward model as transformers knows it: a sequence classifier with one label."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cosmos_app.errors import DataError
from cosmos_app.exporting import export_trained
from cosmos_parallel import ExportError, TrainingMesh, read_config, save_tensors, whole_value_head
from cosmos_parallel import ModelConfig as HeldModelConfig

if TYPE_CHECKING:
    from cosmos_parallel.models import CausalLM, DtypeName

_OUTPUT_HEAD, _SCORE = "lm_head.weight", "score.weight"


def require_classifier(path: Path) -> str:
    """Return the name of transformers' class for a model with one number per sample.

    Raises:
        DataError: if there is none for such a model.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    kind = read_config(path).model_type
    name: str | None = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    if name is None:
        raise DataError(
            f"model.path={path}: transformers has no sequence classification for {kind!r}, so a "
            "reward model of it could not be exported"
        )
    return name


def export_classifier(
    model: "CausalLM",
    directory: Path,
    mesh: TrainingMesh,
    *,
    base: Path,
    training: HeldModelConfig,
    dtype: "DtypeName | None" = None,
) -> None:
    """Write a language model with a value head as a sequence classifier with one label.

    ``AutoModelForSequenceClassification`` loads it; there is no output head in it. Arguments and
    errors are those of `export_trained`.
    """
    whole = directory.with_name(f".{directory.name}-classifier")
    export_trained(model, whole, mesh, base=base, training=training, dtype=dtype)
    score = whole_value_head(model, mesh)
    failure: Exception | None = None
    if mesh.process.rank == 0:
        try:
            _turn_into_classifier(whole, score.cpu(), require_classifier(base))
            if directory.exists():
                shutil.rmtree(directory)
            whole.rename(directory)
        except OSError as error:
            failure = error
    failed = torch.tensor(int(failure is not None), device=mesh.process.device)
    if mesh.max_(failed).item():
        raise ExportError(f"cannot export to {directory}: {failure or 'rank 0 says why'}")


def _turn_into_classifier(directory: Path, score: torch.Tensor, architecture: str) -> None:
    """Exchange the output head in the files of a model for the layer that scores."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    chosen = files[-1]
    for file in files:
        with safe_open(file, "pt") as opened:
            if _OUTPUT_HEAD in opened.keys():  # noqa: SIM118  (not a dictionary)
                chosen = file
    weights = load_file(chosen)
    kind = next(value.dtype for value in weights.values() if value.is_floating_point())
    weights.pop(_OUTPUT_HEAD, None)
    save_tensors(weights | {_SCORE: score.to(kind)}, chosen, {"format": "pt"})
    index = directory / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())
        listed["weight_map"].pop(_OUTPUT_HEAD, None)
        listed["weight_map"][_SCORE] = chosen.name
        index.write_text(json.dumps(listed, indent=2) + "\n")
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": [architecture],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "pad_token_id": _padding(directory),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _padding(directory: Path) -> int | None:
    """Return a token for padding that ends no answer, and have the tokenizer use it.

    Classifiers judge by the last token that is no padding, and answers were judged by what ends
    them: where one token does both, as many tokenizers have it, another special one pads. Without
    any, samples are judged one at a time.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)  # of any model
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if pad is not None and pad != end:
        return int(pad)
    others = [token for token in tokenizer.all_special_ids if token != end]
    if not others:
        return None
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(others[0])
    tokenizer.save_pretrained(directory)
    return int(others[0])
