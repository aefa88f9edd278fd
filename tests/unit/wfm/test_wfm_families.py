"""Every adapter against diffusers' own pipeline, and what one is found by."""

import json
import shutil
import sys
from types import ModuleType

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from cosmos_wfm import (
    CosmosPredictAdapter,
    Guidance,
    NoSafetyChecker,
    PipelineError,
    SanaAdapter,
    Sd3Adapter,
    check_model,
    denoisers_of,
    find_adapter,
    guided_velocity,
    load_adapter,
    sample_ode,
    save_pipeline,
)
from cosmos_wfm.loading import load_outline

CALLS = {
    "sd3": {"max_sequence_length": 256},
    "sana": {"use_resolution_binning": False},
    "sana_video": {"use_resolution_binning": False, "frames": 5},
    "cosmos": {"num_frames": 5},
    "wan": {"num_frames": 5},
    "wan22": {"num_frames": 5, "guidance_scale_2": 2.0},
    "wan22_small": {"num_frames": 5},
}
FRAMES = {name: 1 if name in {"sd3", "sana"} else 5 for name in CALLS}
NEGATIVE = {"cosmos": None}
SCALE = 3.0
SIZE = 32


def pipeline_latents(pipeline, family, latents):
    """Run the pipeline by Euler steps, whose float levels hide no rounding."""
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    output = pipeline(
        prompt="a Red square",
        negative_prompt=NEGATIVE.get(family, ""),
        latents=latents,
        num_inference_steps=3,
        guidance_scale=SCALE,
        height=SIZE,
        width=SIZE,
        output_type="latent",
        **CALLS[family],
    )
    return output.images if hasattr(output, "images") else output.frames


def test_guided_sampling_through_the_adapter_is_what_the_pipeline_does(family, family_adapter):
    adapter = family_adapter
    shape = adapter.latent_shape(FRAMES[family], SIZE, SIZE)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    expected = pipeline_latents(adapter.pipeline, family, latents)
    positive, negative = adapter.encode_text(["a Red square"]), adapter.encode_negative(1)

    guidance = Guidance(SCALE, CALLS[family].get("guidance_scale_2"))

    def velocity(x, sigmas):
        inputs = (x, sigmas)
        return guided_velocity(adapter, adapter.transformer, inputs, positive, negative, guidance)

    found = sample_ode(velocity, latents, adapter.schedule(3), order=1)

    assert (expected - latents).abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_latents_decode_to_the_pipelines_pixels_and_encode_back_by_the_same_constants(
    family, family_adapter
):
    adapter, frames = family_adapter, FRAMES[family]
    latents = torch.randn(
        1, *adapter.latent_shape(frames, SIZE, SIZE), generator=torch.Generator().manual_seed(2)
    )
    adapter.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    output = adapter.pipeline(
        prompt="x",
        latents=latents,
        num_inference_steps=2,
        guidance_scale=1.0,
        height=SIZE,
        width=SIZE,
        output_type="np",
        callback_on_step_end=lambda *args: {"latents": latents},
        callback_on_step_end_tensor_inputs=["latents"],
        **CALLS[family],
    )
    # [B, H, W, 3] or [B, F, H, W, 3]
    drawn = output.images if hasattr(output, "images") else output.frames
    expected = torch.as_tensor(drawn).movedim(-1, 1)

    pixels = adapter.decode(latents)

    torch.testing.assert_close((pixels * 0.5 + 0.5).clamp(0, 1), expected, atol=2e-5, rtol=0)
    assert adapter.encode_pixels(pixels).shape == latents.shape


def test_the_checklist_passes_for_every_family(family, model_dirs):
    points = check_model(model_dirs(family))

    assert [point.name for point in points] == [
        "class name",
        "components",
        "embeddings",
        "SFT forward",
        "rollout step and RL forward",
    ]
    assert [point.passed for point in points] == [True] * 5, points
    assert "ratio 1.0000" in points[-1].detail


@pytest.mark.parametrize("name", ["sd3", "sana", "sana_video", "cosmos", "wan"])
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16])
def test_a_pipeline_saved_in_half_precision_is_trained_in_float32(
    name, saved, model_dirs, tmp_path
):
    whole = load_adapter(model_dirs(name)).pipeline
    for component in whole.components.values():
        if isinstance(component, torch.nn.Module):
            for parameter in component.parameters():
                parameter.data = parameter.data.to(saved)
    save_pipeline(whole, tmp_path / "model")

    adapter = load_adapter(tmp_path / "model")

    modules = [m for m in adapter.pipeline.components.values() if isinstance(m, torch.nn.Module)]
    assert {p.dtype for module in modules for p in module.parameters()} == {torch.float32}
    assert {value.dtype for value in adapter.encode_text(["a red square"]).values()} <= {
        torch.float32,
        torch.int64,
    }
    assert velocity_at(adapter, 0.5).dtype == torch.float32


@pytest.mark.parametrize("name", ["sd3", "sana", "cosmos", "wan"])
def test_a_pipeline_without_the_files_of_a_tokenizer_is_refused(name, model_dirs, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(model_dirs(name), directory)
    tokenizer = directory / ("tokenizer_3" if name == "sd3" else "tokenizer")
    (tokenizer / "tokenizer.json").unlink()

    for load in (load_adapter, load_outline):
        with pytest.raises(PipelineError, match=f"{tokenizer.name} has no vocabulary"):
            load(directory)
    (tokenizer / "vocab.json").write_text("{}")  # of which the merges are missing
    with pytest.raises(PipelineError, match=f"{tokenizer.name} has no vocabulary"):
        load_adapter(directory)
    shutil.rmtree(tokenizer)
    with pytest.raises(PipelineError, match=f"has no {tokenizer.name}/"):
        load_adapter(directory)


def test_a_video_vaes_mean_and_deviation_are_of_its_own_channels(model_dirs):
    adapter = load_adapter(model_dirs("cosmos"))
    vae = adapter.pipeline.vae
    pixels = torch.rand(1, 3, 5, SIZE, SIZE, generator=torch.Generator().manual_seed(3)) * 2 - 1
    with torch.no_grad():
        mode = vae.encode(pixels).latent_dist.mode()
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)

    # Not latents · (1/std) + mean, which newer pipelines' inverted constant invites to.
    torch.testing.assert_close(adapter.encode_pixels(pixels), (mode - mean) / std)
    torch.testing.assert_close(
        adapter.decode((mode - mean) / std), vae.decode(mode)[0], atol=1e-4, rtol=1e-4
    )


def seen_by(transformer):
    calls = []
    transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    return calls


def velocity_at(adapter, sigma, given=None):
    shape = adapter.latent_shape(5 if adapter.temporal_factor else 1, SIZE, SIZE)
    latents = torch.zeros(2, *shape)
    text = adapter.encode_text(["a", "b"])
    with torch.no_grad():
        return adapter.velocity(adapter.transformer, latents, torch.full((2,), sigma), text, given)


def test_cosmos_is_called_at_sigma_and_the_others_at_a_float_thousand_times_sigma(
    family, family_adapter
):
    calls = seen_by(family_adapter.transformer)

    velocity_at(family_adapter, 0.9133)

    expected = 0.9133 if family == "cosmos" else 913.3
    timesteps = calls[0]["timestep"]  # [B], or [B, L] for Wan 2.2's small form
    assert timesteps.shape == ((2, 2) if family == "wan22_small" else (2,))
    assert timesteps.flatten().tolist() == pytest.approx([expected] * timesteps.numel(), abs=1e-3)


@pytest.mark.parametrize("name", ["sana", "sana_video"])
def test_the_text_mask_reaches_sana_under_the_name_it_reads(name, model_dirs):
    adapter = load_adapter(model_dirs(name))
    calls = seen_by(adapter.transformer)
    velocity_at(adapter, 0.5)
    with_mask = velocity_at(adapter, 0.5)
    text = dict(adapter.encode_text(["a", "b"]))
    text["encoder_attention_mask"] = torch.ones_like(text["encoder_attention_mask"])
    with torch.no_grad():
        latents = torch.zeros(2, *adapter.latent_shape(5 if "video" in name else 1, SIZE, SIZE))
        without = adapter.velocity(adapter.transformer, latents, torch.full((2,), 0.5), text)

    assert calls[0]["encoder_attention_mask"].sum() < calls[0]["encoder_attention_mask"].numel()
    assert (with_mask - without).abs().max() > 1e-4


def test_sana_prompts_are_embedded_with_the_pipelines_own_instruction(model_dirs):
    adapter = load_adapter(model_dirs("sana"))
    plain = SanaAdapter(adapter.pipeline, instruction=())

    embeds = [a.encode_text(["a cat"])["encoder_hidden_states"] for a in (adapter, plain)]

    assert embeds[0].shape == embeds[1].shape
    assert (embeds[0] - embeds[1]).abs().max() > 1e-3


def test_given_frames_of_cosmos_are_masked_and_nearly_without_noise(model_dirs):
    adapter = load_adapter(model_dirs("cosmos"))
    calls = seen_by(adapter.transformer)
    given = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).view(2, 1, 2, 1, 1)

    velocity_at(adapter, 0.5, given)

    assert calls[0]["timestep"].flatten().tolist() == pytest.approx([1e-4, 0.5, 0.5, 0.5])
    mask = calls[0]["condition_mask"]
    assert mask.shape == (2, 1, 2, 4, 4)
    assert mask[:, 0, :, 0, 0].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    with pytest.raises(PipelineError, match="takes no conditioning frames"):
        velocity_at(load_adapter(model_dirs("wan")), 0.5, given)


def test_cosmos_text_is_projected_while_its_projection_is_frozen_with_the_same_result(model_dirs):
    adapter = load_adapter(model_dirs("cosmos"))
    small = adapter.encode_text(["a"])["encoder_hidden_states"]
    projected = velocity_at(adapter, 0.5)
    adapter.transformer.requires_grad_(True)
    large = adapter.encode_text(["a"])["encoder_hidden_states"]
    raw = velocity_at(adapter, 0.5)

    assert (small.shape, large.shape) == ((1, 512, 24), (1, 512, 32))
    torch.testing.assert_close(projected, raw, atol=1e-6, rtol=0)
    assert adapter.encode_dropped(2)["encoder_hidden_states"].abs().max() == 0


def test_the_stand_in_for_the_safety_checker_is_never_saved(model_dirs, tmp_path):
    adapter = load_adapter(model_dirs("cosmos"))
    assert isinstance(adapter, CosmosPredictAdapter)
    assert isinstance(adapter.pipeline.safety_checker, NoSafetyChecker)

    save_pipeline(adapter.pipeline, tmp_path / "saved")

    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    assert index.get("safety_checker", [None, None]) == [None, None]
    assert isinstance(adapter.pipeline.safety_checker, NoSafetyChecker)


def test_frames_that_no_latents_are_for_are_refused(model_dirs):
    video, image = load_adapter(model_dirs("wan")), load_adapter(model_dirs("sd3"))

    assert video.latent_shape(5, 32, 48) == (16, 2, 4, 6)
    with pytest.raises(PipelineError, match="multiple of 4, for instance 5 or 9"):
        video.latent_shape(7, 32, 32)
    assert image.latent_shape(1, 32, 32) == (4, 16, 16)


def test_a_third_party_names_its_adapter_or_registers_an_entry_point(model_dirs, tmp_path):
    module = ModuleType("somebodys_adapters")
    module.Mine = type("Mine", (Sd3Adapter,), {})
    sys.modules["somebodys_adapters"] = module
    try:
        named = load_adapter(model_dirs("sd3"), adapter="somebodys_adapters:Mine")
        assert type(named) is module.Mine
        with pytest.raises(PipelineError, match=r"is no module:Class"):
            find_adapter("StableDiffusion3Pipeline", "somebodys_adapters:Absent")
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[cosmos_wfm.adapters]\nTheirPipeline = somebodys_adapters:Mine\n"
        )
        sys.path.insert(0, str(tmp_path))
        try:
            assert find_adapter("TheirPipeline") is module.Mine
        finally:
            sys.path.remove(str(tmp_path))
    finally:
        del sys.modules["somebodys_adapters"]


def test_a_reloaded_pipeline_is_the_one_that_was_built(family, model_dirs):
    extra = {"safety_checker": NoSafetyChecker()} if family == "cosmos" else {}
    pipeline = DiffusionPipeline.from_pretrained(model_dirs(family), **extra)
    adapter = load_adapter(model_dirs(family))

    for component, module in denoisers_of(adapter).items():
        own, loaded = getattr(pipeline, component).state_dict(), module.state_dict()
        assert own.keys() == loaded.keys()
        assert all(torch.equal(own[name], loaded[name]) for name in own)
