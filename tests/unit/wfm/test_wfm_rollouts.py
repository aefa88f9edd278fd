"""Rollouts: whose sample is whose, and that settings reach the sampler."""

import math
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cosmos_wfm
from cosmos_wfm import (
    AwmConfig,
    DiffusionRl,
    DiffusionRlConfig,
    FlowGrpoConfig,
    NftConfig,
    SamplerConfig,
    SdeConfig,
    load_adapter,
    tiny_sd3_pipeline,
)
from cosmos_wfm.rollouts import RolloutTask, counted_numbers
from cosmos_wfm.scoring import GuardedScorer


def lengths(pixels, prompts):
    scores = Future()
    scores.set_result([float(len(prompt)) for prompt in prompts])
    return scores


@pytest.fixture
def task(model_dirs):
    return RolloutTask(
        adapter=load_adapter(model_dirs("sd3")),
        config=SamplerConfig(num_steps=3, height=16, width=16),
        sde=None,
        seed=0,
        step=2,
        reward=GuardedScorer(lengths, 30.0),
    )


def run(task, numbers, prompts):
    return task.run(task.adapter.transformer, numbers, prompts)


def test_samples_of_several_prompts_in_one_micro_batch_keep_their_own(task):
    together = run(task, [0, 1, 2, 3], ["a", "a", "bcd", "bcd"])
    alone = run(task, [2], ["bcd"])

    torch.testing.assert_close(together.latents[2:3], alone.latents, atol=1e-5, rtol=0)
    assert together.rewards.result(30.0).values == (1.0, 1.0, 3.0, 3.0)
    assert (together.latents[2] - together.latents[3]).abs().max() > 0.1
    advantages = torch.tensor([-1.0, 1.0, -2.0, 2.0])
    batch = task.forward_batches(together, advantages, 1.0)[0]
    assert batch.advantages.tolist() == advantages.tolist()


def test_each_sample_has_its_own_order_of_the_rollouts_own_levels(task):
    rollout = run(task, [0, 1, 2], ["a", "b", "c"])
    batches = task.forward_batches(rollout, torch.zeros(3), 0.99)

    # Two of three levels: the share is rounded down.
    assert len(batches) == 2
    levels = set(task.sigmas[:-1].tolist())
    for row in range(3):
        own = [batch.sigmas[row].item() for batch in batches]
        assert len(set(own)) == 2
        assert set(own) <= levels
    assert task.forward_batches(rollout, torch.zeros(3), 1.0)[2].sigmas.tolist() != [levels]


def test_numbers_beyond_the_steps_samples_count_nothing(task):
    rollout = run(task, [1, 3], ["a", "b"])

    weights = [b.weights.tolist() for b in task.forward_batches(rollout, torch.ones(3), 1.0)]
    assert weights == [[1.0, 0.0]] * 3


def test_numbers_beyond_the_steps_samples_ask_for_no_level_that_no_sample_asks_for(task):
    # a second denoiser that only they ask would have a gradient of 0, and move by its momentum
    rollout = run(task, [2, 3, 5], ["a", "b", "c"])

    batches = task.forward_batches(rollout, torch.ones(3), 1.0)
    for batch in batches:
        assert batch.sigmas[1:].tolist() == [batch.sigmas[0].item()] * 2
    assert len({batch.sigmas[0].item() for batch in batches}) == 3
    assert counted_numbers([2, 3, 5], torch.tensor([True] * 3)) == [2, 2, 2]
    assert counted_numbers([0, 2, 3], torch.tensor([True, True, False])) == [0, 1, 1]


def test_samples_without_an_advantage_count_nothing(task):
    rollout = run(task, [0, 1, 2], ["a", "b", "c"])
    advantages = torch.tensor([1.0, math.nan, -1.0])

    for batch in task.forward_batches(rollout, advantages, 1.0):
        assert batch.weights.tolist() == [1.0, 0.0, 1.0]
        assert batch.advantages.tolist() == [1.0, 0.0, -1.0]


def test_the_sampler_is_the_ode_unless_noise_is_asked_for(task):
    plain = run(task, [0], ["a"])
    noisy = run(replace(task, sde=SdeConfig(eta=0.7)), [0], ["a"])

    assert len(plain.steps) == 0
    assert [step.noise_level > 0 for step in noisy.steps] == [True, True]
    assert (plain.latents - noisy.latents).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["sana_video", "cosmos", "wan"])
def test_a_video_has_the_frames_of_its_recipe(task, model_dirs, name):
    video = replace(
        task,
        adapter=load_adapter(model_dirs(name)),
        config=SamplerConfig(num_steps=1, height=32, width=64, frames=9),
    )

    rollout = run(video, [0], ["a"])

    assert rollout.latents.shape[2:] == (3, *video.adapter.latent_shape(9, 32, 64)[2:])
    assert video.adapter.decode(rollout.latents).shape == (1, 3, 9, 32, 64)


def test_latents_and_probabilities_stay_float32(task):
    noisy = run(replace(task, sde=SdeConfig()), [0], ["a"])

    assert {noisy.latents.dtype, noisy.steps[0].log_probs.dtype} == {torch.float32}


def test_no_device_is_written_into_the_code():
    for path in Path(cosmos_wfm.__file__).parent.rglob("*.py"):
        assert "cuda" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("algorithm", [AwmConfig(), FlowGrpoConfig(kl=0.1), NftConfig(kl=0.1)])
def test_samples_that_are_not_finite_are_left_out_of_a_step(algorithm, tmp_path):
    torch.manual_seed(0)
    pipeline = tiny_sd3_pipeline(num_layers=1)
    pipeline.save_pretrained(tmp_path / "whole")
    numbers = [{*pipeline.tokenizer(each)["input_ids"]} for each in ("a red square", "a blue one")]
    embedding = pipeline.text_encoder.get_input_embeddings().weight.data
    embedding[sorted(numbers[1] - numbers[0])] = math.nan
    pipeline.save_pretrained(tmp_path / "broken")
    (tmp_path / "prompts.txt").write_text("a red square\na blue one\n")

    def score(pixels, prompts):  # of both models alike: none for blue
        means = pixels.flatten(1).mean(1).tolist()
        return [math.nan if "blue" in p else m for m, p in zip(means, prompts, strict=True)]

    taken = []
    for model in ("whole", "broken"):
        config = DiffusionRlConfig(
            model=str(tmp_path / model),
            prompts=str(tmp_path / "prompts.txt"),
            output=str(tmp_path / "out"),
            rewards={},
            groups_per_step=2,
            samples_per_group=2,
            sampler=SamplerConfig(num_steps=3, height=16, width=16),
            algorithm=algorithm,
        )
        taken.append(DiffusionRl(config, scorer=score).step(0))

    for report, figures in taken:
        assert report.outcome == "updated"
        assert (figures["samples_trained"], figures["samples_left_out"]) == (2.0, 2.0)
    (one, _), (other, _) = taken
    assert other.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-7)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert one.grad_norm > 0
