"""Models of transformers: read whole, or built empty and filled on each rank with its own parts.

Which tensors of the files make which of the model is transformers' own knowledge (some are renamed,
stacked or joined); here it is decided how much of each is read:

    one file tensor, renamed at most     this rank's rows and columns of it
    a stack of experts                   the matrices of this rank's experts
    anything else                        the sources whole, one tensor of the model after the other
"""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_parallel.errors import ModelMismatchError
from cosmos_parallel.value_head import is_of_value_head
from cosmos_parallel.weight_files import WeightFiles, held_pieces, mismatch_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightConverter

# what adapters are added to lies inside of them; stacks of experts, of two tensors, twice over
_INSIDE_ADAPTERS = re.compile(r"(\.base_layer)+\.")


def build_empty(
    path: Path, config: "PretrainedConfig", dtype: torch.dtype, attention: str
) -> "PreTrainedModel":
    """Return the model of a directory on the meta device.

    Raises:
        ModelMismatchError: if transformers cannot make it.
    """
    from transformers import GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping

    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    except (ValueError, KeyError, RuntimeError) as error:
        raise cannot_load_error(path, error) from error
    # asked for now, as FSDP2 gives modules classes of other names; an export undoes these
    model._weight_conversions = get_model_conversion_mapping(model)  # type: ignore[assignment]
    model.config.name_or_path = str(path)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def fill_parts(
    model: "PreTrainedModel",
    path: Path,
    device: torch.device,
    *,
    apart: AbstractSet[str] | None = None,
) -> None:
    """Give a sharded model on the meta device memory, and read this rank's part of every weight.

    Adapters and a value head are left as they are: no file of the model has them.

    Args:
        model: whole, or one stage of it.
        path: directory in Hugging Face form.
        device: where to.
        apart: of a stage, names of weights that are left as they are too; ``None`` for a whole
            model, whose tied weights are tied.

    Raises:
        ModelMismatchError: naming weights that are missing or of another shape.
    """
    model.to_empty(device=device)
    if apart is None:
        model.tie_weights()
    _compute_buffers(model)
    tensors = {
        _INSIDE_ADAPTERS.sub(".", name): value
        for name, value in model.state_dict(keep_vars=True).items()
        if ".lora_" not in name and not is_of_value_head(name) and name not in (apart or ())
    }
    problems: list[str] = []
    filled: set[int] = set()  # by identity, as tied weights have several names
    with WeightFiles(path) as files, torch.no_grad():
        sources = _find_sources(model, tensors, files)
        for name, source in sources.alike.items():
            value = tensors[name]
            stored = {source: torch.empty(value.shape, device="meta")}
            for region, part in held_pieces(value):
                problems += files.read(stored, region, part)
            filled.add(id(value))
        for first in sources.made:
            for name, problem in sources.make(first, model, tensors, files):
                problems += [problem] if problem else []
                filled.add(id(tensors[name]))
    problems += [f"missing weights: {name}" for name in tensors if id(tensors[name]) not in filled]
    if problems:
        raise mismatch_error(path, problems)


@dataclass(slots=True)
class _Sources:
    """Where the tensors of a model come from.

    Attributes:
        alike: the file tensor that a tensor of the model equals.
        made: what makes the others, by the first that it makes.
        inputs: file tensors of each of these, by the pattern that they match, in order.
    """

    alike: dict[str, str] = field(default_factory=dict[str, str])
    made: "dict[str, WeightConverter]" = field(default_factory=dict)  # type: ignore[assignment]
    inputs: dict[str, dict[str, list[str]]] = field(default_factory=dict[str, dict[str, list[str]]])

    def make(
        self,
        first: str,
        model: "PreTrainedModel",
        tensors: Mapping[str, Tensor],
        files: WeightFiles,
    ) -> Iterator[tuple[str, str]]:
        """Read what ``first`` and its like are made from, and write this rank's part of them.

        Yields:
            Every name that was made, and what is wrong with it.
        """
        converter, inputs = self.made[first], self.inputs[first]
        experts = held_pieces(tensors[first])[0][0][0]
        is_stack = _stacks_experts(converter) and all(
            len(names) == tensors[first].shape[0] for names in inputs.values()
        )
        for pattern, names in inputs.items():
            for name in names[experts] if is_stack else names:
                converter.add_tensor(first, name, pattern, partial(files.whole, name))  # type: ignore[arg-type]
        if is_stack and experts.start == experts.stop:
            yield first, ""  # no expert is this rank's
            return
        try:
            made = converter.convert(first, model=model, config=model.config)
        except (RuntimeError, ValueError) as error:
            yield first, f"mismatched weights: {first}: {error}"
            return
        for name, value in made.items():
            if name in tensors:
                yield name, _put(value, tensors[name], name, cut_already=is_stack)


def _put(value: Any, tensor: Tensor, name: str, *, cut_already: bool) -> str:
    """Write this rank's part of a value; return what is wrong with it."""
    whole: Tensor = value[0] if isinstance(value, list) else value
    pieces = held_pieces(tensor)
    expected = tuple(tensor.shape)
    if cut_already:
        experts = pieces[0][0][0]
        expected = (experts.stop - experts.start, *expected[1:])
    if tuple(whole.shape) != expected:
        return f"mismatched weights: {name} is {tuple(whole.shape)}, the config says {expected}"
    for region, part in pieces:
        rows = slice(0, expected[0]) if cut_already else region[0]
        part.copy_(whole[(rows, *region[1:])])
    return ""


def _stacks_experts(converter: "WeightConverter") -> bool:
    """Whether each input is a row of what is made: stacked first, then joined on other dims."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(each, Concatenate) and each.dim > 0 for each in others)
    )


def _find_sources(
    model: "PreTrainedModel", tensors: Mapping[str, Tensor], files: WeightFiles
) -> _Sources:
    """Ask transformers what each tensor of the files becomes, as its own loading does."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms: list[Any] = model._weight_conversions  # type: ignore[assignment]
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, known = model.base_model_prefix, dict(tensors)
    found = _Sources()
    for name in sorted(files.names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target not in known:
            continue
        if pattern is None:
            found.alike[target] = name
            continue
        if target not in found.made:
            found.made[target] = deepcopy(by_pattern[pattern])
        found.inputs.setdefault(target, {}).setdefault(pattern, []).append(name)
    model._weight_conversions = [each for each in transforms if each.was_used()]  # type: ignore[assignment]
    return found


def names_in_files(path: Path) -> dict[str, str]:
    """Return what the files of a model call each tensor that they have as the model has it.

    Tensors that the model stacks or joins are left out. Most models' names are their files'; those
    with a vision part have had others before.

    Raises:
        ModelMismatchError: if transformers cannot make the model.
    """
    from transformers import AutoConfig

    model = build_empty(path, AutoConfig.from_pretrained(path), torch.float32, "eager")
    tensors = dict(model.state_dict(keep_vars=True))
    with WeightFiles(path) as files:
        return _find_sources(model, tensors, files).alike


def _compute_buffers(model: "PreTrainedModel") -> None:
    """Compute what no file has, such as frequencies of rotary embeddings."""
    for value in model.state_dict(keep_vars=True).values():
        vars(value)["_is_hf_initialized"] = True  # by which transformers knows what to leave alone
    model.initialize_weights()


def cannot_load_error(path: Path, error: Exception) -> ModelMismatchError:
    """Say that transformers cannot load a directory."""
    return ModelMismatchError(
        f"model directory {path} cannot be loaded as a causal language model: {error}"
    )


def auto_class(config: "PretrainedConfig") -> Any:  # both have the same untyped interface
    """Return what loads a language model, or one that sees images besides.

    Some types (Qwen3.5, Llama 4) are known as either; as a language model they would be loaded
    without the part that sees, and exported without it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = config.model_type
    as_text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    sees = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind, as_text)
    return AutoModelForCausalLM if as_text and as_text == sees else AutoModelForImageTextToText


def supported_attention(config: "PretrainedConfig", wanted: str) -> str:
    """Return ``eager`` for a model whose attention cannot be torch's own (GPT-OSS has sinks)."""
    kind: Any = auto_class(config)._model_mapping.get(type(config), None)
    return wanted if wanted != "sdpa" or getattr(kind, "_supports_sdpa", True) else "eager"


def num_parameters(config: "PretrainedConfig") -> int:
    """Return how many parameters a model of transformers has, without making them."""
    with torch.device("meta"):
        built = auto_class(config).from_config(config)
    return sum(parameter.numel() for parameter in built.parameters())
