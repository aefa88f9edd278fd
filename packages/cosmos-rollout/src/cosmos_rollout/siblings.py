"""One sibling of a group: its seed, and how a scored sample becomes a trajectory."""

import hashlib
from dataclasses import dataclass

import numpy as np

from cosmos_core.messages import Generate, GroupId, SampleRef
from cosmos_core.trajectory import UNSAMPLED, Trajectory, VersionSpan
from cosmos_rollout.engine import GeneratedSample
from cosmos_rollout.prompts import PromptRow
from cosmos_rollout.rewards import Failure, Outcome


@dataclass(frozen=True, slots=True)
class Sibling:
    """A sampled response with what it answers; ``index`` is its place in the group."""

    command: Generate
    index: int
    row: PromptRow
    prompt: tuple[int, ...]
    sample: GeneratedSample


def sample_seed(run_seed: int, group: GroupId, sibling: int) -> int:
    """Return a 62-bit seed for one sibling; another attempt at the group draws the same."""
    text = f"{run_seed}/{group}/{sibling}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


def trajectory_of(sibling: Sibling, outcome: Outcome) -> Trajectory | SampleRef:
    """Join a sample and its rewards; what cannot be trained on becomes a failed `SampleRef`.

    The prompt comes first, untrainable and sampled by nobody; the response carries its log-probs
    and the version of each token.
    """
    if isinstance(outcome, Failure):
        return _failed(sibling, str(outcome))
    sample, num_prompt = sibling.sample, len(sibling.prompt)
    num_tokens = num_prompt + len(sample.token_ids)
    logprobs = np.zeros(num_tokens, dtype=np.float32)
    logprobs[num_prompt:] = sample.logprobs
    trainable = np.zeros(num_tokens, dtype=np.bool_)
    trainable[num_prompt:] = True
    prompt = np.array(sibling.prompt, dtype=np.int32)
    try:
        return Trajectory(
            prompt_id=sibling.row.prompt_id,
            group=str(sibling.command.group),
            sibling=sibling.index,
            attempt=sibling.command.attempt,
            token_ids=np.concatenate([prompt, sample.token_ids]),
            logprobs=logprobs,
            trainable=trainable,
            versions=(VersionSpan(UNSAMPLED, num_prompt), *sample.versions),
            rewards=outcome.rewards,
            reward=outcome.total,
            finish_reason=sample.finish_reason,
            metrics={
                "response_tokens": float(len(sample.token_ids)),
                "truncated": float(sample.finish_reason == "length"),
                "weight_versions": float(len(sample.versions)),
            },
        )
    except ValueError as error:  # such as a log-probability that is not finite
        return _failed(sibling, f"engine: {error}")


def sample_ref(trajectory: Trajectory, key: str) -> SampleRef:
    """Return what the controller is told of a stored trajectory; it counts response tokens."""
    return SampleRef(
        sibling=trajectory.sibling,
        status="completed",
        key=key,
        num_tokens=int(np.count_nonzero(trajectory.trainable)),
        reward=trajectory.reward,
        oldest_version=trajectory.oldest_version,
        newest_version=trajectory.newest_version,
    )


def _failed(sibling: Sibling, failure: str) -> SampleRef:
    return SampleRef(
        sibling=sibling.index,
        status="failed",
        num_tokens=len(sibling.sample.token_ids),
        failure=failure,
    )
