"""Everything that a denoiser is given is where the denoiser is, shown with the device ``meta``.

A tensor on ``meta`` has no values, so that no accelerator is needed; one on the CPU that is mixed
with it is an error, as it would be with an accelerator's.
"""

from concurrent.futures import Future

import pytest
import torch

from cosmos_wfm import (
    SamplerConfig,
    load_adapter,
)
from cosmos_wfm.rollouts import RolloutTask
from cosmos_wfm.scoring import GuardedScorer

META = torch.device("meta")
FAMILIES = ["sd3", "cosmos"]  # the text encoders of others look into their values


def no_scores(pixels, prompts):
    assert pixels.device == META
    scores = Future()
    scores.set_result([0.0] * len(prompts))
    return scores


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_drawn_and_noised_where_the_denoiser_is(model_dirs, family):
    adapter = load_adapter(model_dirs(family))
    adapter.pipeline.to(META)
    frames = 5 if adapter.temporal_factor else 1
    sampler = SamplerConfig(num_steps=2, height=32, width=32, frames=frames)
    scorer = GuardedScorer(no_scores, 30.0)
    task = RolloutTask(adapter=adapter, config=sampler, sde=None, seed=0, step=0, reward=scorer)

    text = adapter.encode_text(["a red square", "a blue one"])
    assert {value.device for value in text.values()} == {META}
    rollout = task.run(adapter.transformer, [0, 1], ["a red square", "a blue one"])
    assert rollout.latents.device == META
    (batch,) = task.forward_batches(rollout, torch.tensor([1.0, -1.0]), 0.5)
    for tensor in (batch.noise, batch.sigmas, batch.advantages, batch.weights):
        assert tensor.device == META
    dropped = adapter.encode_dropped(1)
    assert {value.device for value in dropped.values()} == {META}
