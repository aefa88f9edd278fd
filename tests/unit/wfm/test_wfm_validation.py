"""Pictures of every family: with the frames, size and guidance of the recipe, on its own device."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cosmos_wfm
from cosmos_wfm import SamplerConfig, ValidationConfig, draw_samples


def test_frames_size_and_guidance_are_those_of_the_recipe(family_adapter):
    frames = 5 if family_adapter.temporal_factor else 1
    sampler = SamplerConfig(num_steps=2, height=32, width=64, frames=frames)
    shown = ValidationConfig(prompts=("a red square", "b"), samples_per_prompt=2, sampler=sampler)

    plain = draw_samples(family_adapter, shown)
    again = draw_samples(family_adapter, shown)
    guided = draw_samples(family_adapter, replace(shown, sampler=replace(sampler, guidance=6.0)))

    assert plain.shape == (2, 2, 3, *([frames] if frames > 1 else []), 32, 64)
    assert torch.equal(plain, again)
    assert (plain - guided).abs().max() > 1e-4
    assert (plain[0, 0] - plain[0, 1]).abs().max() > 1e-3  # another noise
    with pytest.raises(TypeError, match="guidance_scale"):
        replace(sampler, guidance_scale=4.5)


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
