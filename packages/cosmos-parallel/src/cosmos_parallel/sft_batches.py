"""Batches of supervised examples: which examples a step trains on, and how they are laid out.

The sample stream is a function of seed and step alone: nothing has to be stored to go on after a
restart, and every rank computes its own share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cosmos_core.choices import check_choice
from cosmos_parallel.errors import PictureError, SftDataError
from cosmos_parallel.example_mixture import ExampleMixture, epoch_order
from cosmos_parallel.packing import plan_micro_batches
from cosmos_parallel.pictures import BLANK_PICTURE, TOKEN_KINDS, PictureReader
from cosmos_parallel.sft_examples import SftData, SftExample

Layout = Literal["padded", "packed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SftBatch:
    """B rows of T tokens, padded on the right.

    Attributes:
        token_ids: int64[B, T]; tokens of videos are those of pictures, and not trained on.
        trainable: bool[B, T]; false on padding.
        position_ids: int64[B, T], counting from 0 in each of several examples in a row; ``None``
            when every row is one example.
        num_tokens: tokens that are not padding.
        image_inputs: what a model that sees takes besides, by its own names (see
            ``PictureReader``); its ``position_ids``, if there, stand in place of those above.
        names: of the examples, for messages.
    """

    token_ids: Tensor
    trainable: Tensor
    position_ids: Tensor | None
    num_tokens: int
    image_inputs: Mapping[str, Tensor] | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SftBatchConfig:
    """How examples become batches.

    Attributes:
        batch_size: examples in a step, over all ranks.
        max_tokens: tokens in a micro-batch, padding included; a longer example is one by itself.
        layout: ``padded`` gives each example a row; ``packed`` puts several into a row, which
            saves padding where lengths differ much and costs an attention mask.
        bucket: row lengths are rounded up to a multiple of this.
        seed: of the order of examples.
    """

    batch_size: int = 64
    max_tokens: int = 16384
    layout: Layout = "padded"
    bucket: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: if a size is below 1, the seed below 0, or there is no such layout.
        """
        check_choice("layout", self.layout, Layout)
        for name in ("batch_size", "max_tokens", "bucket"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")


def step_batches(
    data: SftData, config: SftBatchConfig, step: int, *, rank: int = 0, size: int = 1
) -> list[SftBatch]:
    """Return the micro-batches of this rank in ``step``, counted from 0; see `step_examples`.

    Pictures and videos of the step after it are read meanwhile, in a thread.
    """

    def chosen(step: int) -> list[SftExample]:
        source = data.mixture or len(data.examples)
        places = step_examples(source, config, step)
        return [_named(data.examples[place], place) for place in places]

    batches = lay_out(chosen(step), config, rank=rank, size=size, reader=data.reader)
    if data.reader is not None:
        groups = _groups(chosen(step + 1), config, rank=rank, size=size)
        examples = (example for group in groups for example in group)
        data.reader.show_next(image for example in examples for image in example.images)
    return batches


def _named(example: SftExample, place: int) -> SftExample:
    return example if example.name else replace(example, name=f"example {place}")


def step_examples(examples: int | ExampleMixture, config: SftBatchConfig, step: int) -> list[int]:
    """Return which examples make ``step``, counted from 0.

    Examples come in a new order in every pass over the data; a step may span two passes.

    Args:
        examples: how many there are, or the data sets that take turns.
        config: how many make a step, and the seed of their order.
        step: which one.
    """
    first, last = step * config.batch_size, (step + 1) * config.batch_size
    if isinstance(examples, ExampleMixture):
        return examples.places(range(first, last), config.seed)
    chosen: list[int] = []
    for epoch in range(first // examples, -(-last // examples)):
        order = epoch_order(examples, config.seed, epoch)
        start = max(first - epoch * examples, 0)
        chosen += order[start : last - epoch * examples].tolist()
    return chosen


def lay_out(
    examples: Sequence[SftExample],
    config: SftBatchConfig,
    *,
    rank: int = 0,
    size: int = 1,
    reader: PictureReader | None = None,
) -> list[SftBatch]:
    """Return this rank's share of ``examples`` as micro-batches.

    Packed: each micro-batch is one row within the budget, and ranks get about equal numbers of
    tokens and of micro-batches. Padded: longest first, and ranks get equal numbers of examples, to
    one, and about equal numbers of tokens.

    Args:
        examples: of the step, over all ranks.
        config: how they become batches.
        rank: of those with different data.
        size: how many these are.
        reader: of the model, if it sees: pictures are opened here, and a micro-batch without any
            gets a blank one that changes no loss, for the sake of other ranks.

    Raises:
        SftDataError: naming the row of a picture that cannot be read.
        PackingError: if the layout is packed, and the model does not tell pictures of a row apart.
    """
    groups = _groups(examples, config, rank=rank, size=size)
    return [_collate(group, config, reader) for group in groups]


def empty_batch(reader: PictureReader | None = None) -> SftBatch:
    """Return a batch with nothing to train on: the filler of ranks without examples.

    Args:
        reader: of the model, if it sees.
    """
    if reader is not None:
        return replace(_collate([], SftBatchConfig(bucket=1), reader), num_tokens=0)
    return SftBatch(
        token_ids=torch.zeros((1, 2), dtype=torch.int64),
        trainable=torch.zeros((1, 2), dtype=torch.bool),
        position_ids=None,
        num_tokens=0,
    )


def _groups(
    examples: Sequence[SftExample], config: SftBatchConfig, *, rank: int, size: int
) -> list[list[SftExample]]:
    """Return the examples of each of this rank's micro-batches."""
    if config.layout == "packed":
        return _packed(examples, config, rank=rank, size=size)
    ordered = sorted(examples, key=lambda example: -len(example.token_ids))
    # there and back again, so that the first rank does not get the longest of every round
    rounds = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    mine = [
        members[size - 1 - rank] if index % 2 and len(members) == size else members[rank]
        for index, members in enumerate(rounds)
        if rank < len(members)
    ]
    return _group(mine, config)


def _packed(
    examples: Sequence[SftExample], config: SftBatchConfig, *, rank: int, size: int
) -> list[list[SftExample]]:
    if not examples:
        return []
    lengths = [len(example.token_ids) for example in examples]
    # rows are rounded up to the bucket, so that budget and bucket hold together
    budget = max(config.max_tokens // config.bucket * config.bucket, 1)
    parts = plan_micro_batches(lengths, max_tokens=budget, num_ranks=size)[rank]
    return [[examples[index] for index in part] for part in parts]


def _group(examples: Sequence[SftExample], config: SftBatchConfig) -> list[list[SftExample]]:
    """Cut examples, longest first, into groups whose padded size is within the budget."""
    groups: list[list[SftExample]] = []
    width = 0
    for example in sorted(examples, key=lambda example: -len(example.token_ids)):
        if not groups or (len(groups[-1]) + 1) * width > config.max_tokens:
            groups.append([])
            width = _round_up(len(example.token_ids), config.bucket)
        groups[-1].append(example)
    return groups


def _collate(
    examples: Sequence[SftExample], config: SftBatchConfig, reader: PictureReader | None
) -> SftBatch:
    """Put examples into one batch; of a model that sees with a picture among them at least."""
    num_tokens = sum(len(example.token_ids) for example in examples)
    names = tuple(example.name for example in examples if example.name)
    if reader is not None and not any(example.images for example in examples):
        examples = _with_blank(examples, config, reader)
    batch = replace(_padded(examples, config.bucket), num_tokens=num_tokens, names=names)
    if reader is not None:
        inputs = _image_inputs(examples, batch.token_ids, reader)
        if config.layout == "packed":
            inputs["position_ids"] = reader.positions(batch.token_ids, inputs)
        seen = reader.as_seen(batch.token_ids)
        batch = replace(batch, token_ids=seen, image_inputs=inputs)
    if config.layout == "padded":
        return batch
    return _in_one_row(batch, [len(example.token_ids) for example in examples], config.bucket)


def _padded(examples: Sequence[SftExample], bucket: int) -> SftBatch:
    # two at least: a column and the next one, which it predicts
    width = _round_up(max([2, *(len(example.token_ids) for example in examples)]), bucket)
    token_ids = np.zeros((len(examples), width), dtype=np.int64)
    trainable = np.zeros((len(examples), width), dtype=np.bool_)
    for index, example in enumerate(examples):
        end = len(example.token_ids)
        token_ids[index, :end] = example.token_ids
        trainable[index, 1:end] = example.trainable[1:]  # nothing comes before the first
    return SftBatch(
        token_ids=torch.from_numpy(token_ids),
        trainable=torch.from_numpy(trainable),
        position_ids=None,
        num_tokens=0,
    )


def _in_one_row(batch: SftBatch, lengths: Sequence[int], bucket: int) -> SftBatch:
    """Put the rows of a padded batch, which are so long without padding, into one."""
    columns = torch.arange(batch.token_ids.shape[1])
    valid = columns < torch.tensor(lengths, dtype=torch.int64)[:, None]
    missing = _round_up(max(2, sum(lengths)), bucket) - sum(lengths)
    counts = torch.cat([columns[:length] for length in lengths] + [torch.arange(missing)])

    def joined(values: Tensor) -> Tensor:
        return functional.pad(values[valid], (0, missing))[None]

    inputs = dict(batch.image_inputs or {})
    for name in TOKEN_KINDS & inputs.keys():
        inputs[name] = joined(inputs[name])
    if "position_ids" in inputs:
        axes = inputs["position_ids"][:, valid]
        inputs["position_ids"] = torch.cat([axes, counts[len(counts) - missing :].expand(4, -1)], 1)
        inputs["position_ids"] = inputs["position_ids"][:, None]
    return replace(
        batch,
        token_ids=joined(batch.token_ids),
        trainable=joined(batch.trainable),
        position_ids=counts[None],
        image_inputs=inputs or None,
    )


def _image_inputs(
    examples: Sequence[SftExample], token_ids: Tensor, reader: PictureReader
) -> dict[str, Tensor]:
    names = [example.name or f"example {index}" for index, example in enumerate(examples)]
    try:
        return reader.inputs(token_ids, [example.images for example in examples], names)
    except PictureError as error:
        raise SftDataError(str(error)) from error


def _with_blank(
    examples: Sequence[SftExample], config: SftBatchConfig, reader: PictureReader
) -> list[SftExample]:
    """Show a blank picture behind the shortest example, where no token sees it and none is trained.

    A row of its own would be padded like the others.
    """
    token_ids = np.asarray(reader.blank_row(), dtype=np.int32)
    blank = SftExample(
        token_ids=token_ids,
        trainable=np.zeros(len(token_ids), dtype=np.bool_),
        images=(BLANK_PICTURE,),
        name="blank picture",
    )
    if config.layout == "packed" or not examples:
        return [*examples, blank]
    *others, shortest = sorted(examples, key=lambda example: -len(example.token_ids))
    parts = (shortest, blank)
    longer = replace(
        blank,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        trainable=np.concatenate([part.trainable for part in parts]),
    )
    return [*others, longer]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
