"""One sibling of a group: its seed, and how a scored episode becomes a trajectory."""

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cosmos_core.messages import Generate, GroupId, SampleRef
from cosmos_core.trajectory import UNSAMPLED, TeacherScores, Trajectory
from cosmos_rollout.episode import Episode
from cosmos_rollout.prompts import PromptRow, prompt_text
from cosmos_rollout.rewards import Failure, Outcome, RewardInput


@dataclass(frozen=True, slots=True)
class Sibling:
    """An episode with the row it began with; ``index`` is its place in the group."""

    command: Generate
    index: int
    row: PromptRow
    episode: Episode | None


def sample_seed(run_seed: int, group: GroupId, sibling: int) -> int:
    """Return a 62-bit seed for one sibling; another attempt at the group draws the same."""
    text = f"{run_seed}/{group}/{sibling}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def group_seed(run_seed: int, group: GroupId) -> int:
    """Return a 62-bit seed that all siblings of a group share; every attempt has the same."""
    return sample_seed(run_seed, group, -1)


def reward_input(row: PromptRow, episode: Episode) -> RewardInput:
    """Return an episode as rewards see it."""
    said = {"role": "assistant", "content": episode.response}
    return RewardInput(
        prompt=prompt_text(row),
        response=episode.response,
        answer=row.answer,
        fields=row.fields,
        num_prompt_tokens=episode.num_prompt_tokens,
        num_response_tokens=episode.num_response_tokens,
        finish_reason=episode.finish_reason,
        messages=episode.messages or ((*row.messages, said) if row.messages else ()),
        images=episode.images,
    )


def trajectory_of(
    sibling: Sibling, outcome: Outcome, teacher: TeacherScores | None = None
) -> Trajectory | SampleRef:
    """Join an episode and its rewards; what cannot be trained on becomes a failed `SampleRef`.

    What the environment itself gave is added to the total as it is.
    """
    episode = sibling.episode
    if isinstance(outcome, Failure):
        by = outcome.reward if outcome.is_own else ""
        return _failed(sibling, str(outcome), unrewarded_by=by)
    if episode is None:
        return _failed(sibling, "there is no episode")
    try:
        return Trajectory(
            prompt_id=sibling.row.prompt_id,
            group=str(sibling.command.group),
            sibling=sibling.index,
            attempt=sibling.command.attempt,
            token_ids=episode.token_ids,
            logprobs=episode.logprobs,
            trainable=episode.trainable,
            versions=episode.versions,
            rewards={**episode.rewards, **outcome.rewards},
            reward=outcome.total + sum(episode.rewards.values()),
            finish_reason=episode.finish_reason,
            metrics=_metrics(episode),
            teacher=teacher,
            images=episode.images,
        )
    except ValueError as error:  # such as a log-probability that is not finite
        return _failed(sibling, f"engine: {error}")


def _metrics(episode: Episode) -> dict[str, float]:
    sampled = [span.version for span in episode.versions if span.version != UNSAMPLED]
    changes = sum(before != after for before, after in pairwise(sampled))
    metrics = {
        **episode.metrics,
        "response_tokens": float(episode.num_response_tokens),
        "truncated": float(episode.finish_reason == "length"),
        "weight_versions": float(changes + 1),
    }
    return {**metrics, "turns": float(episode.num_turns)} if episode.messages else metrics


def sample_ref(trajectory: Trajectory, key: str, data_set: str = "") -> SampleRef:
    """Return what the controller is told of a stored trajectory; it counts response tokens."""
    return SampleRef(
        sibling=trajectory.sibling,
        status="completed",
        key=key,
        num_tokens=int(np.count_nonzero(trajectory.trainable)),
        length=trajectory.num_tokens,
        reward=trajectory.reward,
        oldest_version=trajectory.oldest_version,
        newest_version=trajectory.newest_version,
        truncated=trajectory.finish_reason == "length",
        rewards=tuple(trajectory.rewards.items()),
        data_set=data_set,
    )


def _failed(sibling: Sibling, failure: str, *, unrewarded_by: str = "") -> SampleRef:
    return SampleRef(
        sibling=sibling.index,
        status="failed",
        num_tokens=sibling.episode.num_response_tokens if sibling.episode else 0,
        failure=failure,
        unrewarded_by=unrewarded_by,
    )
