"""Pictures of every family: with the frames, size and guidance of the recipe, on its own device."""

import ast
from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch

import cosmos_wfm
from cosmos_wfm import (
    DiffusionSftConfig,
    LoraTuning,
    MockCaptionsConfig,
    SamplerConfig,
    ValidationConfig,
    draw_samples,
    train_sft,
)


def test_frames_size_and_guidance_are_those_of_the_recipe(family_adapter):
    frames = 5 if family_adapter.temporal_factor else 1
    sampler = SamplerConfig(num_steps=2, height=32, width=64, frames=frames)
    shown = ValidationConfig(prompts=("a red square", "b"), samples_per_prompt=2, sampler=sampler)

    plain = draw_samples(family_adapter, shown)
    again = draw_samples(family_adapter, shown)
    guided = draw_samples(family_adapter, replace(shown, sampler=replace(sampler, guidance=6.0)))

    assert plain.shape == (2, 2, 3, *([frames] if frames > 1 else []), 32, 64)
    assert torch.equal(plain, again)
    together = draw_samples(family_adapter, shown, at_once=2)
    torch.testing.assert_close(together, plain, atol=1e-4, rtol=0)
    assert (plain - guided).abs().max() > 1e-4
    assert (plain[0, 0] - plain[0, 1]).abs().max() > 1e-3  # another noise
    with pytest.raises(TypeError, match="guidance_scale"):
        replace(sampler, guidance_scale=4.5)


def test_no_more_samples_are_drawn_at_once_than_a_pass_of_training_has(model_dirs, tmp_path):
    sampler = SamplerConfig(num_steps=1, height=32, width=32, frames=5)
    shown = ValidationConfig(prompts=("a",), samples_per_prompt=3, sampler=sampler, fps=24)
    recipe = DiffusionSftConfig(
        model=str(model_dirs("wan22_small")),
        data=MockCaptionsConfig(num_samples=2, frames=5, height=32, width=32),
        output=str(tmp_path / "out"),
        num_steps=1,
        batch_size=2,
        micro_batch_size=2,
        validation=shown,
        tuning=LoraTuning(rank=2, alpha=4),
    )
    sizes = []

    def keep(module, arguments, named):
        sizes.append(len(named["hidden_states"]))

    class Watched(LoraTuning):
        def prepare(self, adapter, *, seed):
            super().prepare(adapter, seed=seed)
            adapter.transformer.register_forward_pre_hook(keep, with_kwargs=True)

    train_sft(replace(recipe, tuning=Watched(rank=2, alpha=4)))

    assert sizes == [2, 1, 2, 2, 1]  # before the step, the step, after it
    with av.open(str(tmp_path / "out" / "validation" / "step_1" / "0_2.mp4")) as video:
        assert video.streams.video[0].average_rate == 24


def test_no_module_names_a_device():
    package = Path(cosmos_wfm.__file__).parent
    named = [
        f"{path.name}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.partition(":")[0] in {"cuda", "mps", "xpu"}
    ]
    assert not named
