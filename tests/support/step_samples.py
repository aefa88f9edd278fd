"""Samples of a step, as a controller has them and as a loop in float64 has them."""

from dataclasses import replace

import numpy as np
import torch
import transformers
from float64_steps import Given, scored

from cosmos_core.messages import SampleRef, Train
from cosmos_core.trajectory import Trajectory, VersionSpan

VOCABULARY = 31
TEMPERATURE = 0.7
POLICY_VERSION = 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
# group, reward, tokens, first trained, tokens of a tool's, cut off
ROWS = (
    ("a", 1.0, 9, 3, (), False),
    ("a", 0.0, 5, 3, (), False),
    ("a", 0.5, 4, 3, (), False),  # an answer of one token
    ("a", 0.25, 12, 3, (5, 6, 7), False),
    ("a", 2.0, 8, 3, range(3, 8), False),  # nothing but a tool's words
    ("a", 0.75, 11, 3, (), True),
    ("b", 1.0, 6, 1, (), False),  # a prompt of one token, and a group of one
    ("c", 1.0, 7, 2, (), False),  # a group of equal rewards
    ("c", 1.0, 3, 2, (), False),
    ("d", 1.0, 4, 1, (), False),
    ("d", 0.0, 2, 1, (), False),
    ("d", 3.0, 10, 1, (), True),
)


def versions_of(number: int, size: int) -> tuple[int, ...]:
    """Return the version that each token is of, the second half one later than the first."""
    return tuple(number % 4 + (place >= size // 2) for place in range(size))


def given_samples(model, head) -> list[Given]:
    """Return the samples with log-probabilities of another policy than the model."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for number, (group, reward, length, begin, of_tool, _) in enumerate(ROWS):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        trained = [place for place in range(begin, length) if place not in of_tool]
        versions = versions_of(number, length)
        lags = [POLICY_VERSION - versions[place] for place in trained]
        sample = Given(ids, trained, [0.0] * len(trained), reward, group, lags)
        logprobs = scored(model, head, sample, TEMPERATURE).logprobs.detach()
        moved = logprobs + 0.8 * torch.randn(len(trained), generator=generator)
        samples.append(replace(sample, behaviour=moved.float().tolist()))
    return samples


def exact(path):
    """Return transformers' own model in float64; only its eager attention caps scores."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return load(path, dtype=torch.float64, **how).eval()


def trajectory_of(number: int, sample: Given) -> Trajectory:
    size = len(sample.token_ids)
    versions = versions_of(number, size)
    logprobs, trainable = np.zeros(size, np.float32), np.zeros(size, np.bool_)
    trainable[list(sample.trained)] = True
    logprobs[list(sample.trained)] = sample.behaviour
    return Trajectory(
        prompt_id="p",
        group=sample.group,
        sibling=number,
        attempt=0,
        token_ids=np.array(sample.token_ids, np.int32),
        logprobs=logprobs,
        trainable=trainable,
        versions=tuple(
            VersionSpan(version, versions.count(version)) for version in sorted(set(versions))
        ),
        rewards={},
        reward=sample.reward,
        finish_reason="length" if ROWS[number][-1] else "stop",
    )


def step_of(trajectories) -> Train:
    groups: dict[str, list[SampleRef]] = {}
    for number, trajectory in enumerate(trajectories):
        ref = SampleRef(
            sibling=number,
            status="completed",
            key=str(number),
            num_tokens=trajectory.num_trainable,
            length=trajectory.num_tokens,
            reward=trajectory.reward,
            truncated=trajectory.finish_reason == "length",
        )
        groups.setdefault(trajectory.group, []).append(ref)
    return Train(step=1, groups=tuple(map(tuple, groups.values())), publish=False)
