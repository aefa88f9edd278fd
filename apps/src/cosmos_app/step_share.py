"""Which samples of a step one rank trains on, and what each of them weighs in the whole step.

Advantages and weights follow from the references in the ``Train`` command alone, so every rank
works them out for the whole step and fetches only the trajectories of its own share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from cosmos_algos import (
    Algorithm,
    SampleWeights,
    StepRewards,
    TokenBatch,
    collate,
    empty_batch,
    in_one_row,
    split_batches,
    with_idle_tokens,
    without_truncated,
)
from cosmos_app.errors import EmptyGroupError, MixedUpSampleError
from cosmos_core.control import payload_key
from cosmos_core.messages import SampleRef, Train
from cosmos_core.trajectory import Trajectory, decode_trajectory
from cosmos_parallel import (
    BLANK_PICTURE,
    PictureReader,
    balanced_parts,
    num_patches,
    plan_micro_batches,
)

Layout = Literal["packed", "padded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """The part of a step that one rank trains on.

    Attributes:
        refs: its samples, in the order of the step.
        advantages: float64[n], one per sample.
        weights: their entries in the weights of the whole step.
    """

    refs: tuple[SampleRef, ...]
    advantages: torch.Tensor
    weights: SampleWeights


def share_of_step(
    train: Train,
    algorithm: Algorithm,
    *,
    index: int,
    num_shares: int,
    mask_truncated: bool = False,
) -> StepShare:
    """Return share ``index`` of ``num_shares`` of a step; shares have about as many tokens each.

    Tokens of prompts count, which passes go over like any other. What has no trained token is part
    of its group's statistics, and of no share: it weighs nothing, and no pass is spent on it.

    Args:
        train: the whole step.
        algorithm: what makes advantages and weights of it.
        index: which share.
        num_shares: among how many ranks, over all replicas.
        mask_truncated: leave out samples that a limit of tokens cut off.

    Raises:
        EmptyGroupError: if a group has no completed sample. No controller makes such a step: it has
            the prompt sampled again, and drops it in the end.
        EmptyStepError: if the step has no groups.
    """
    refs: list[SampleRef] = []
    groups: list[int] = []
    for number, group in enumerate(train.groups):
        completed = [ref for ref in group if ref.status == "completed"]
        if not completed:
            raise EmptyGroupError(_said_of_empty(train, number))
        refs.extend(completed)
        groups.extend([number] * len(completed))
    num_tokens = trained_tokens(refs, mask_truncated=mask_truncated)
    advantages, weights = algorithm.step_targets(
        StepRewards(
            rewards=[ref.reward for ref in refs],
            groups=groups,
            num_tokens=num_tokens,
            lengths=[ref.num_tokens for ref in refs],
        )
    )
    trained = [i for i, count in enumerate(num_tokens) if count]
    lengths = [max(refs[i].length, refs[i].num_tokens) for i in trained]
    mine = [trained[i] for i in balanced_parts(lengths, num_shares)[index]]
    return StepShare(
        refs=tuple(refs[i] for i in mine),
        advantages=advantages[mine],
        weights=weights.select(mine),
    )


def _said_of_empty(train: Train, number: int) -> str:
    failures = sorted({ref.failure for ref in train.groups[number]})
    why = f"all {len(train.groups[number])} failed ({'; '.join(failures)})" if failures else "none"
    return (
        f"step {train.step}: group {number} of {len(train.groups)} has no completed sample: {why}; "
        "it has to be sampled again, or left out of the step"
    )


def trained_tokens(refs: Sequence[SampleRef], *, mask_truncated: bool) -> list[int]:
    """Return how many tokens of each sample are trained on.

    Args:
        refs: samples that are completed.
        mask_truncated: none of those that a limit of tokens cut off.
    """
    num_tokens = [ref.num_tokens for ref in refs]
    if not mask_truncated:
        return num_tokens
    return without_truncated(num_tokens, ["length" if ref.truncated else "stop" for ref in refs])


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """How the samples of a share become micro-batches.

    Attributes:
        layout: ``packed`` puts samples into one row without padding, ``padded`` gives each a row.
        max_tokens: tokens in a micro-batch, padding included.
        vocab_size: token ids have to be below it; 0 where it is not known.
        pictures: what shows pictures to the model, where there are any.
    """

    layout: Layout
    max_tokens: int
    vocab_size: int = 0
    pictures: PictureReader | None = None


def read_samples(refs: Sequence[SampleRef], payloads: Sequence[bytes]) -> list[Trajectory]:
    """Return the samples that were fetched, each of them the one that it was fetched as.

    The controller counts and bounds by references: what they say has to be true of what is trained
    on.

    Args:
        refs: as the step has them.
        payloads: what is stored under the key of each.

    Raises:
        MixedUpSampleError: if one is of another group, attempt or sibling, has another number of
            trained tokens, or is of other versions.
        TrajectoryFormatError: if one is damaged.
    """
    found = [decode_trajectory(payload) for payload in payloads]
    for ref, sample in zip(refs, found, strict=True):
        said = (ref.key, ref.num_tokens, ref.oldest_version, ref.newest_version)
        key = payload_key(sample.group, sample.attempt, sample.sibling)
        held = (key, sample.num_trainable, sample.oldest_version, sample.newest_version)
        if said != held:
            raise MixedUpSampleError(
                f"a step was given the sample {_described(*said)}; what is stored there is "
                f"{_described(*held)}"
            )
    return found


def _described(key: str, num_tokens: int, oldest_version: int, newest_version: int) -> str:
    return f"{key}, {num_tokens} tokens of versions {oldest_version} to {newest_version}"


def batches_of_share(
    share: StepShare, trajectories: Sequence[Trajectory], plan: BatchPlan, *, policy_version: int
) -> list[TokenBatch]:
    """Cut a share into micro-batches; a share without samples is one batch of nothing.

    Raises:
        TokenIdError: if a sample has a token beyond the vocabulary, where that is known.
        PictureError: if a picture cannot be read, or is not that of the tokens.
    """
    if not trajectories:
        return [_laid_out(empty_batch(), [()], plan)]
    lengths = [t.num_tokens for t in trajectories]
    if plan.layout == "packed":
        (parts,) = plan_micro_batches(lengths, max_tokens=plan.max_tokens)
    else:
        parts = split_batches(lengths, plan.max_tokens)
    batches: list[TokenBatch] = []
    for rows in parts:
        batch = collate(
            [trajectories[i] for i in rows],
            share.advantages[rows],
            share.weights.select(rows),
            policy_version=policy_version,
            vocab_size=plan.vocab_size,
        )
        batches.append(_laid_out(batch, [trajectories[i].images for i in rows], plan))
    return batches


def _laid_out(batch: TokenBatch, images: Sequence[Sequence[str]], plan: BatchPlan) -> TokenBatch:
    """Return a padded batch as the plan has it, with its pictures if there are any."""
    if plan.pictures is not None:
        is_packed = plan.layout == "packed"
        batch = show_pictures(batch, images, plan.pictures, to_be_packed=is_packed)
    if plan.layout == "padded":
        return batch
    if plan.pictures is not None and batch.image_inputs is not None:
        positions = plan.pictures.positions(batch.token_ids, batch.image_inputs)
        batch = replace(batch, image_inputs={**batch.image_inputs, "position_ids": positions})
    return in_one_row(batch)


def show_pictures(
    batch: TokenBatch,
    images: Sequence[Sequence[str]],
    pictures: PictureReader,
    *,
    to_be_packed: bool = False,
) -> TokenBatch:
    """Return a batch with its pictures; if it has none, with a blank one behind its shortest row.

    Ranks that divide a model must all enter its vision part, or wait for each other for ever.
    Tokens of videos become those of pictures.

    Args:
        batch: padded.
        images: references of the pictures and videos of each row.
        pictures: of the model.
        to_be_packed: the rows are put into one next, without their padding.

    Raises:
        PictureError: if a picture cannot be read, or is not that of the tokens.
    """
    if not any(images):
        batch, row = with_idle_tokens(batch, pictures.blank_row(), valid=to_be_packed)
        images = [(BLANK_PICTURE,) if index == row else () for index in range(len(images))]
    inputs = pictures.inputs(batch.token_ids, images, batch.names)
    return replace(batch, token_ids=pictures.as_seen(batch.token_ids), image_inputs=inputs)


def batch_sizes(batch: TokenBatch, config: Any) -> dict[str, torch.Tensor]:
    """Return sums that tell how fast and how full passes were, beside a loss's own metrics.

    ``batch/tokens`` of the samples, ``batch/places`` that a pass works on, padding included, and
    ``batch/pairs``, the squares of the samples' lengths; of pictures ``batch/patches``, and
    ``batch/patch_pairs`` (see ``num_patches``).

    Args:
        batch: what a pass works on.
        config: the model's Hugging Face config.
    """
    if batch.segments is None:
        lengths = batch.valid.sum(-1)
    else:
        lengths = torch.bincount(batch.segments[batch.valid])
    patches, patch_pairs = num_patches(batch.image_inputs or {}, config)
    return {
        "batch/tokens": lengths.sum(),
        "batch/places": torch.tensor(batch.token_ids.numel(), device=lengths.device),
        "batch/pairs": lengths.square().sum(),
        "batch/patches": torch.tensor(patches, dtype=torch.float64, device=lengths.device),
        "batch/patch_pairs": torch.tensor(patch_pairs, dtype=torch.float64, device=lengths.device),
    }


def step_statistics(train: Train, *, mask_truncated: bool = False) -> dict[str, float]:
    """Return what a step's references say of it: reward, staleness, lengths, switched responses.

    Staleness counts versions from the oldest token of a group to the step that trains on it.
    ``truncated`` is the share of samples that a limit of tokens cut off, ``masked`` the share of
    those that have no trained token, for that reason or another. Every part of the reward has its
    mean, ``reward/NAME``, over the samples that have it, and every data set the mean reward of its
    samples, ``data_set/NAME``.
    """
    groups = [[r for r in group if r.status == "completed"] for group in train.groups]
    refs = [ref for group in groups for ref in group]
    if not refs:
        return {}
    staleness = [
        train.step - min(versions)
        for group in groups
        if (versions := [ref.oldest_version for ref in group if ref.num_tokens])
    ]
    trained = trained_tokens(refs, mask_truncated=mask_truncated)
    return {
        "reward": _mean(refs, lambda ref: ref.reward),
        "reward_std": float(torch.tensor([ref.reward for ref in refs]).std(correction=0)),
        "tokens_per_sample": _mean(refs, lambda ref: float(ref.num_tokens)),
        "num_tokens": float(sum(ref.num_tokens for ref in refs)),
        "num_samples": float(len(refs)),
        "switched": _mean(refs, lambda ref: float(ref.newest_version > ref.oldest_version)),
        "truncated": _mean(refs, lambda ref: float(ref.truncated)),
        "masked": trained.count(0) / len(refs),
        "staleness_mean": sum(staleness) / max(len(staleness), 1),
        "staleness_max": float(max(staleness, default=0)),
        "zero_signal": sum(len({r.reward for r in group}) < 2 for group in groups) / len(groups),
        **_mean_rewards(refs),
    }


def _mean_rewards(refs: Sequence[SampleRef]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for ref in refs:
        for name, value in ref.rewards:
            values.setdefault(f"reward/{name}", []).append(value)
        if ref.data_set:
            values.setdefault(f"data_set/{ref.data_set}", []).append(ref.reward)
    return {name: sum(given) / len(given) for name, given in values.items()}


def _mean(refs: Sequence[SampleRef], of: Callable[[SampleRef], float]) -> float:
    return sum(of(ref) for ref in refs) / len(refs)
