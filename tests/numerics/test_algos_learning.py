"""Policy loss, learner and a real Qwen3 together: the rewarded token becomes likely."""

import numpy as np
import pytest
import torch

from cosmos_algos import (
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    NoCorrection,
    ObjectiveConfig,
    Share,
    empty_batch,
    policy_loss,
    summarise_metrics,
)
from cosmos_core import Trajectory, VersionSpan

transformers = pytest.importorskip("transformers")
parallel = pytest.importorskip("cosmos_parallel")

REWARDED = 5


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tiny_model():
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=12,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def sample_group(model, prompt, generator, version, num_samples=16):
    """Sample one token after each prompt; 1 for the rewarded token, else 0."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, -1].double(), -1)
    drawn = torch.multinomial(logp.exp(), num_samples, replacement=True, generator=generator)
    length = len(prompt) + 1
    return [
        Trajectory(
            prompt_id=str(prompt),
            group=f"train.0.{prompt}.{version}",
            sibling=sibling,
            attempt=0,
            token_ids=np.array([*prompt, token], np.int32),
            logprobs=np.array([*[0.0] * len(prompt), logp[token]], np.float32),
            trainable=np.arange(length) == length - 1,
            versions=(VersionSpan(-1, length - 1), VersionSpan(version, 1)),
            rewards={},
            reward=float(token == REWARDED),
            finish_reason="stop",
        )
        for sibling, token in enumerate(drawn.tolist())
    ]


def train(config, num_steps, max_tokens=128, staleness=0, optimizer=None):
    """Return mean rewards, the last report, and the model; samples are ``staleness`` steps old."""
    model, algorithm = tiny_model(), config.build()
    optimizer = optimizer or parallel.AdamWConfig(lr=1e-2)
    learner = parallel.Learner(model, parallel.LearnerConfig(optimizer=optimizer))
    generator, waiting, rewards, report = torch.Generator().manual_seed(3), [], [], None
    for version in range(num_steps + staleness):
        step = [
            sample
            for prompt in ([3, 4], [6, 7, 8], [9])
            for sample in sample_group(model, prompt, generator, len(rewards))
        ]
        waiting.append(step)
        if version < staleness:
            continue
        ready = waiting.pop(0)
        batches = algorithm.batches(ready, Share(max_tokens=max_tokens), policy_version=version)
        report = learner.step(batches, policy_loss(config), filler=empty_batch())
        rewards.append(sum(sample.reward for sample in step) / len(step))
    return rewards, report, model


@pytest.mark.parametrize(
    ("config", "staleness"),
    [
        (GrpoConfig(), 3),
        (DapoConfig(), 0),
        (
            DrGrpoConfig(objective=ObjectiveConfig(anchor="behaviour", correction=NoCorrection())),
            3,
        ),
    ],
    ids=["grpo-stale", "dapo", "dr-grpo-stale-behaviour"],
)
def test_the_reward_rises(config, staleness):
    rewards, _, _ = train(config, num_steps=30, staleness=staleness)

    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.9


def test_micro_batches_make_no_difference_to_the_weights():
    # Plain SGD: Adam would blow rounding up in rows whose gradient is nearly 0.
    sgd = parallel.SgdConfig(lr=0.5)
    _, _, whole = train(GrpoConfig(), num_steps=2, max_tokens=10_000, optimizer=sgd)
    _, _, parts = train(GrpoConfig(), num_steps=2, max_tokens=8, optimizer=sgd)

    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(other, one, atol=1e-6, rtol=0)


def test_on_policy_samples_show_no_mismatch():
    _, report, _ = train(GrpoConfig(), num_steps=1)

    metrics = summarise_metrics(report.metrics)

    assert metrics["tokens"] == 48
    assert metrics["mismatch/abs"] < 1e-5
    assert metrics["mismatch/effective_share"] == pytest.approx(1.0)
    assert metrics["lag0/tokens"] == 1.0
