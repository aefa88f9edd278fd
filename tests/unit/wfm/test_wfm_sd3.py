"""The SD3 adapter against diffusers' own pipeline."""

import json
from itertools import pairwise

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from cosmos_wfm import (
    DiffusionSftConfig,
    FullTuning,
    ImageCaptionsConfig,
    PipelineError,
    Sd3Adapter,
    check_model,
    load_adapter,
    tiny_captions,
    tiny_sd3_pipeline,
    train_sft,
)
from cosmos_wfm.loading import load_outline


def test_stepping_by_the_adapters_velocity_and_schedule_is_what_the_pipeline_does(adapter):
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = adapter.pipeline(
        "a red square",
        latents=latents,
        num_inference_steps=4,
        guidance_scale=1.0,
        height=32,
        width=32,
        output_type="latent",
    ).images

    sigmas, text, found = adapter.schedule(4), adapter.encode_text(["a red square"]), latents
    with torch.no_grad():
        for now, then in pairwise(sigmas):
            found = found + (then - now) * adapter.velocity(
                adapter.transformer, found, now[None], text
            )

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_latents_are_shifted_and_scaled_by_the_vaes_constants_and_back(adapter):
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(2)) * 2 - 1
    with torch.no_grad():
        mean = adapter.pipeline.vae.encode(pixels).latent_dist.mean
        decoded = adapter.pipeline.vae.decode(mean).sample

    latents = adapter.encode_pixels(pixels)

    torch.testing.assert_close(latents, (mean - 0.0609) * 1.5305)
    torch.testing.assert_close(adapter.decode(latents), decoded, atol=1e-5, rtol=0)


def test_a_pipeline_comes_back_frozen_with_what_training_asks(adapter):
    assert isinstance(adapter, Sd3Adapter)
    assert adapter.shift == 3.0
    assert adapter.size_multiple == 4
    assert len(adapter.blocks) == 2
    assert not any(p.requires_grad for p in adapter.transformer.parameters())
    names = {name for name, _ in adapter.transformer.named_modules()}
    for target in adapter.lora_targets:
        assert f"transformer_blocks.0.{target}" in names


def test_the_tiny_pipeline_is_the_same_for_a_seed_and_leaves_the_random_state_alone():
    torch.manual_seed(7)
    first = tiny_sd3_pipeline(seed=3).transformer.state_dict()
    after = torch.rand(1)
    second = tiny_sd3_pipeline(seed=3).transformer.state_dict()
    torch.manual_seed(7)

    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(after, torch.rand(1))


def test_directories_that_are_no_pipeline_or_not_ours_are_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"it has no model_index\.json"):
        load_adapter(tmp_path)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(PipelineError, match="is a FluxPipeline: there is no adapter for"):
        load_adapter(tmp_path)
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(PipelineError, match="names no pipeline class"):
        load_adapter(tmp_path)


def test_the_checklist_stops_at_the_first_point_that_fails(model_dir, tmp_path):
    (tmp_path / "model_index.json").write_text((model_dir / "model_index.json").read_text())

    points = check_model(tmp_path)

    assert [point.passed for point in points] == [True, False]


def test_a_pipeline_without_t5_trains_and_what_it_saves_loads_without_it(model_dir, tmp_path):
    missing = {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(model_dir, **missing)
    pipeline.save_pretrained(tmp_path / "model")
    tiny_captions(tmp_path / "data", size=16)
    recipe = DiffusionSftConfig(
        model=str(tmp_path / "model"),
        data=ImageCaptionsConfig(path=str(tmp_path / "data"), height=16, width=16),
        output=str(tmp_path / "out"),
        num_steps=1,
        batch_size=1,
        tuning=FullTuning(),
    )

    saved = train_sft(recipe)

    text = load_adapter(saved).encode_text(["a red square"])
    theirs = StableDiffusion3Pipeline.from_pretrained(saved, **missing)
    expected, _, _, _ = theirs.encode_prompt("a red square", None, None, max_sequence_length=256)
    assert torch.equal(text["encoder_hidden_states"], expected)
    assert load_outline(saved).pipeline.text_encoder_3 is None


@pytest.mark.parametrize("most", ["10GB", "50KB"])
def test_weights_that_are_there_as_a_variant_only_are_loaded(tmp_path, most):
    pipeline = tiny_sd3_pipeline(num_layers=1)
    pipeline.save_pretrained(tmp_path, variant="fp16", max_shard_size=most)

    loaded = load_adapter(tmp_path)

    expected = pipeline.transformer.state_dict()
    assert all(torch.equal(w, expected[n]) for n, w in loaded.transformer.state_dict().items())
    assert load_outline(tmp_path).shift == 3.0


def test_weights_that_are_cut_short_are_named(tmp_path):
    tiny_sd3_pipeline(num_layers=1).save_pretrained(tmp_path)
    weights = tmp_path / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    with pytest.raises(
        PipelineError, match=r"model\.safetensors is no whole .*incomplete metadata"
    ):
        load_adapter(tmp_path)
