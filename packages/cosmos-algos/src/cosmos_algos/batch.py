"""A micro-batch: right-padded ``[B, T]`` tensors in which column t is about predicting token t+1.

Everything that a loss reads is aligned to the *prediction*: at column t stand the target (token
t+1), whether it is trained, how likely the behaviour policy found it, and what it weighs. The
last column predicts nothing.

    token_ids           7  8  5  6  0      prompt 7 8, response 5 6, one pad
    targets             8  5  6  0  0
    trainable           .  x  x  .  .
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cosmos_algos.aggregation import SampleWeights, check_entries
from cosmos_algos.arguments import check_lengths, check_mask, check_whole
from cosmos_algos.errors import MissingScoresError, ShapeError, TokenIdError, TrajectoryError
from cosmos_algos.samples import Samples
from cosmos_core.trajectory import Trajectory

_OF_CANDIDATES = frozenset({"teacher_top_logprobs", "teacher_top_token_ids"})
_WHOLE_NUMBERS = frozenset({"token_ids", "targets", "lags", "segments", "teacher_top_token_ids"})
_MASKS = frozenset({"valid", "trainable"})
ScoreField = Literal["old_logprobs", "reference_logprobs", "teacher_logprobs", "values", "returns"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """B samples of at most T tokens, all a loss needs of them.

    Attributes:
        token_ids: the samples, right-padded.
        valid: true where a token is, false at padding.
        targets: the token that each column predicts.
        trainable: true where that target is trained on.
        behaviour_logprobs: log μ of the target; 0 where not trainable.
        advantages: advantage of the target.
        token_weights: weight of the target's loss in the step's sum; 0 where not trainable.
        denominators: what each sample adds to the step's denominator, float64.
        lags: how many versions behind the trainer the target was sampled; 0 where not trainable.
        old_logprobs: log π_old of the target, if the caller computed it.
        reference_logprobs: log π_ref of the target, if the caller computed it.
        teacher_logprobs: log-probability of the target under a teacher, likewise.
        teacher_top_logprobs: of the tokens that the teacher finds likeliest in its place, likewise.
        teacher_top_token_ids: which these are.
        values: what a critic expected before the target was drawn, likewise.
        returns: what the critic should have expected, once advantages are made of its values.
        imitation_weights: weight of the target's negative log-likelihood in the step's sum.
        segments: number of the sample that each column belongs to, for rows that hold several.
        image_inputs: what a model that sees pictures takes besides, by its own names:
            ``pixel_values`` and the like of all rows' pictures one after the other, and what is
            said of tokens, such as ``mm_token_type_ids`` [B, T] and ``position_ids`` [A, B, T].
        names: group and sibling of each sample, for messages.
    """

    token_ids: Int[Tensor, "B T"]
    valid: Bool[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    trainable: Bool[Tensor, "B T"]
    behaviour_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    token_weights: Float[Tensor, "B T"]
    denominators: Float[Tensor, " B"]
    lags: Int[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"] | None = None
    reference_logprobs: Float[Tensor, "B T"] | None = None
    teacher_logprobs: Float[Tensor, "B T"] | None = None
    teacher_top_logprobs: Float[Tensor, "B T K"] | None = None
    teacher_top_token_ids: Int[Tensor, "B T K"] | None = None
    values: Float[Tensor, "B T"] | None = None
    returns: Float[Tensor, "B T"] | None = None
    imitation_weights: Float[Tensor, "B T"] | None = None
    segments: Int[Tensor, "B T"] | None = None
    image_inputs: Mapping[str, Tensor] | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse fields that are not of the batch's samples and tokens.

        Raises:
            ShapeError: names the field, what it has and what it must have.
        """
        size = self.token_ids.shape
        if len(size) != 2:
            raise ShapeError(f"batch: token_ids {tuple(size)}; they must be [B, T]")
        for field in fields(self):
            entry = getattr(self, field.name)
            if not isinstance(entry, Tensor):
                continue
            wanted = size[:1] if field.name == "denominators" else size
            of_each_token = entry.shape[:-1] if field.name in _OF_CANDIDATES else entry.shape
            if of_each_token != wanted:
                raise ShapeError(
                    f"batch: {field.name} {tuple(entry.shape)} for token_ids {tuple(size)}; "
                    f"it must have {tuple(wanted)} (see collate)"
                )
            _check_type(field.name, entry)

    def to(self, device: torch.device | str) -> "TokenBatch":
        """Return the batch with its tensors on ``device``.

        Those of pictures stay where they are: a step's pictures are larger than all else that it
        has, and each is wanted in one pass at a time (see `image_arguments`).
        """
        entries = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, object] = {
            name: entry.to(device, non_blocking=True)
            for name, entry in entries.items()
            if isinstance(entry, Tensor)
        }
        return replace(self, **moved)

    def image_arguments(self) -> dict[str, Tensor]:
        """Return ``image_inputs`` on the device of the tokens, for one pass; empty if none."""
        device = self.token_ids.device
        given = self.image_inputs or {}
        return {name: entry.to(device, non_blocking=True) for name, entry in given.items()}

    def only_trained(self) -> "TokenBatch":
        """Return the batch with 0 for all numbers of columns that are not trained, NaN included."""
        kept: dict[str, Any] = {}
        for field in fields(self):
            entry = getattr(self, field.name)
            if not isinstance(entry, Tensor) or entry.shape != self.trainable.shape:
                continue
            if entry.is_floating_point():
                kept[field.name] = entry.where(self.trainable, 0.0)
        return replace(self, **kept)

    @property
    def samples(self) -> Samples:
        """Which trainable tokens belong to one sample."""
        return Samples(self.trainable, self.segments)

    def scores_of(self, field: ScoreField, because: str) -> Float[Tensor, "B T"]:
        """Return one of the optional fields.

        Args:
            field: its name.
            because: what needs it, for the message.

        Raises:
            MissingScoresError: if the batch has none.
        """
        scores: Tensor | None = getattr(self, field)
        if scores is None:
            first = f" (first sample: {self.names[0]})" if self.names else ""
            raise MissingScoresError(f"{because} needs the batch's {field}; it has none{first}")
        return scores


def collate(
    trajectories: Sequence[Trajectory],
    advantages: Float[Tensor, " N"],
    weights: SampleWeights,
    *,
    pad_id: int = 0,
    policy_version: int = 0,
    vocab_size: int = 0,
) -> TokenBatch:
    """Lay samples out as one batch.

    Args:
        trajectories: the samples, one row each.
        advantages: one per sample; every trained token of the sample gets it.
        weights: the entries of these samples in the weights of the whole step.
        pad_id: token id of the padding; any id of the vocabulary will do.
        policy_version: version the trainer holds now, from which lags are counted.
        vocab_size: token ids have to be below it; 0 where it is not known.

    Returns:
        A batch on the CPU, float32 but for the denominators, as wide as the longest sample and at
        least one column.

    Raises:
        TrajectoryError: if the first token of a sample is trainable: no token predicts it.
        TokenIdError: if a token id is negative or beyond the vocabulary.
        ShapeError: if advantages or weights are not of these samples.
    """
    check_lengths("collate", {"samples": trajectories, "advantages": advantages})
    check_entries(weights, len(trajectories))
    for trajectory in trajectories:
        _check_tokens(trajectory, vocab_size)
    width = max([1, *(trajectory.num_tokens for trajectory in trajectories)])
    token_ids = lay_out([t.token_ids for t in trajectories], width, pad_id)
    valid = lay_out([np.ones(t.num_tokens, np.bool_) for t in trajectories], width, False)
    trainable = next_column(lay_out([t.trainable for t in trajectories], width, False))
    logprobs = next_column(lay_out([t.logprobs for t in trajectories], width, 0.0))
    versions = next_column(
        lay_out([t.version_of_each_step() for t in trajectories], width, policy_version)
    )
    kept = trainable.float()
    return TokenBatch(
        token_ids=token_ids.long(),
        valid=valid,
        targets=next_column(token_ids).long(),
        trainable=trainable,
        behaviour_logprobs=logprobs.float().where(trainable, 0.0),
        advantages=advantages.float()[:, None] * kept,
        token_weights=weights.token.float()[:, None] * kept,
        denominators=weights.denominator.double(),
        lags=(policy_version - versions.long()) * trainable,
        teacher_logprobs=_of_teachers(trajectories, width, "logprobs"),
        teacher_top_logprobs=_of_teachers(trajectories, width, "top_logprobs"),
        teacher_top_token_ids=_of_teachers(trajectories, width, "top_token_ids"),
        imitation_weights=(
            None if weights.imitation is None else weights.imitation.float()[:, None] * kept
        ),
        names=tuple(_name(trajectory) for trajectory in trajectories),
    )


def _of_teachers(
    trajectories: Sequence[Trajectory],
    width: int,
    of: Literal["logprobs", "top_logprobs", "top_token_ids"],
) -> Tensor | None:
    """Return what teachers said of the targets, if all samples were scored alike."""
    scores = [getattr(t.teacher, of) for t in trajectories if t.teacher is not None]
    shapes = {array.shape[1:] for array in scores}
    if len(scores) < len(trajectories) or len(shapes) != 1 or shapes == {(0,)}:
        return None
    columns = next_column(lay_out(scores, width, 0))
    return columns.long() if of == "top_token_ids" else columns.float()


def batch_of_targets(
    targets: Int[Tensor, "B T"],
    trainable: Bool[Tensor, "B T"],
    behaviour_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"] | Float[Tensor, "B T"],
    weights: SampleWeights,
) -> TokenBatch:
    """Make a batch for ``policy_objective`` of the tensors that a loop of one's own has.

    Each column is about one token that was predicted: completions alone, or ``ids[:, 1:]`` of whole
    rows with scores of ``logits[:, :-1]``. Padding may stand anywhere, and what stands in columns
    that are not trained does not matter. The batch is no input of ``model_scores``.

    Example:
        >>> mask = torch.tensor([[False, True, True], [True, False, False]])
        >>> weights = sample_weights(mask.sum(1), ["a", "a"], AggregationConfig())
        >>> batch = batch_of_targets(ids, mask, logprobs, torch.tensor([1.0, -1.0]), weights)
        >>> loss = policy_objective(scores_from_logits(logits, ids), batch, ObjectiveConfig())

    Args:
        targets: the predicted tokens; their device is that of the batch.
        trainable: which of them are trained on.
        behaviour_logprobs: log μ of each, by the policy that sampled.
        advantages: of each sample, or of each token.
        weights: of these samples, out of those of the whole step: all ranks and micro-batches.

    Raises:
        ShapeError: if something is not of these targets, or the mask is one of numbers.
    """
    check_entries(weights, len(targets))
    check_mask("batch: trainable", trainable)
    device = targets.device
    each = advantages.to(device).float()
    each = each[:, None].expand(targets.shape) if each.dim() == 1 else each
    kept = trainable.float()
    imitation = weights.imitation
    return TokenBatch(
        token_ids=targets,
        valid=trainable,
        targets=targets,
        trainable=trainable,
        behaviour_logprobs=behaviour_logprobs.float(),
        advantages=each,
        token_weights=weights.token.float().to(device)[:, None] * kept,
        denominators=weights.denominator.to(device, torch.float64),
        lags=torch.zeros_like(targets),
        imitation_weights=(
            None if imitation is None else imitation.float().to(device)[:, None] * kept
        ),
    ).only_trained()


def empty_batch(num_tokens: int = 2, pad_id: int = 0, num_rows: int = 1) -> TokenBatch:
    """Return rows of padding with weight 0, for a rank that has nothing left to train on.

    Its forward and backward pass do all the collectives of a real one and add exact zeros.
    """
    shape = (num_rows, num_tokens)
    return TokenBatch(
        token_ids=torch.full(shape, pad_id),
        valid=torch.zeros(shape, dtype=torch.bool),
        targets=torch.full(shape, pad_id),
        trainable=torch.zeros(shape, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(shape),
        advantages=torch.zeros(shape),
        token_weights=torch.zeros(shape),
        denominators=torch.zeros(num_rows, dtype=torch.float64),
        lags=torch.zeros(shape, dtype=torch.long),
    )


def _check_type(field: str, entry: Tensor) -> None:
    """Refuse numbers of another kind: whole ones where logs are, or a mask that counts."""
    if field in _MASKS:
        check_mask(f"batch: {field}", entry)
        return
    if field in _WHOLE_NUMBERS:
        check_whole(f"batch: {field}", entry)
    elif not entry.is_floating_point():
        raise ShapeError(f"batch: {field} is of {entry.dtype}; it must have fractions: .float()")


def _check_tokens(trajectory: Trajectory, vocab_size: int) -> None:
    if not trajectory.num_tokens:
        return
    if trajectory.trainable[0]:
        raise TrajectoryError(
            f"{_name(trajectory)}: token 0 is trainable, but no token predicts it"
        )
    check_token_ids(trajectory.token_ids, vocab_size, _name(trajectory))


def check_token_ids(token_ids: npt.NDArray[np.int32], vocab_size: int, name: str) -> None:
    """Refuse tokens that the vocabulary does not have.

    Raises:
        TokenIdError: names the sample, the place and the token.
    """
    wrong = (token_ids < 0) | (token_ids >= vocab_size) if vocab_size else token_ids < 0
    if wrong.any():
        place = int(wrong.argmax())
        bound = f"0 to {vocab_size - 1}" if vocab_size else "0 or more"
        raise TokenIdError(f"{name}: token {place} is {token_ids[place]}; token ids are {bound}")


def _name(trajectory: Trajectory) -> str:
    return f"group {trajectory.group} sibling {trajectory.sibling}"


def lay_out(
    arrays: Sequence[npt.NDArray[np.generic]], width: int, fill: int | float | bool
) -> Tensor:
    """Put arrays, of T steps first, into rows of one width, right-padded with ``fill``."""
    first = arrays[0] if arrays else np.zeros(0, np.float32)
    rows = np.full((len(arrays), width, *first.shape[1:]), fill, dtype=first.dtype)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(rows)


def next_column(tokens: Tensor) -> Tensor:
    """Move column t+1 to column t; the last column, which predicts nothing, becomes 0."""
    moved = torch.zeros_like(tokens)
    moved[:, :-1] = tokens[:, 1:]
    return moved
