"""An adapter of somebody else's, over a pipeline that calls its denoiser ``unet``."""

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

from cosmos_wfm import FullTuning, LoraTuning


class UnetAdapter:
    """As much of an adapter as tuning and saving ask for."""

    denoiser = "unet"
    unsaved = ()
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(self, pipeline):
        self.pipeline = pipeline

    @property
    def transformer(self):
        return self.pipeline.unet

    def velocity(self):
        generator = torch.Generator().manual_seed(1)
        latents = torch.randn(2, 4, 8, 8, generator=generator)
        text = torch.randn(2, 3, 8, generator=generator)
        with torch.no_grad():
            return self.pipeline.unet(latents, 500.0, text).sample


def pipeline_of(unet):
    return StableDiffusionPipeline(
        vae=None,
        text_encoder=None,
        tokenizer=None,
        unet=unet,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def tiny_unet():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(8, 8),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=8,
            attention_head_dim=4,
            norm_num_groups=4,
        )
    return unet.eval()


@pytest.fixture
def adapter():
    return UnetAdapter(pipeline_of(tiny_unet()))


def shaken(adapter):
    """Give the trained weights other values, as training would."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in adapter.transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_adapters_of_a_unet_load_back_bit_for_bit(adapter, tmp_path):
    before = adapter.velocity()
    LoraTuning(rank=2, alpha=6).prepare(adapter, seed=0)
    shaken(adapter)
    LoraTuning(rank=2, alpha=6).save(adapter, tmp_path / "saved", writes=True)

    again = UnetAdapter(pipeline_of(tiny_unet()))
    again.pipeline.load_lora_weights(
        tmp_path / "saved" / "lora", weight_name="model.safetensors", adapter_name="default"
    )
    assert torch.equal(again.velocity(), adapter.velocity())
    assert (adapter.velocity() - before).abs().max() > 1e-3


def test_a_tuned_unet_is_saved_in_its_place(adapter, tmp_path):
    FullTuning().prepare(adapter, seed=0)
    shaken(adapter)
    FullTuning().save(adapter, tmp_path / "saved", writes=True)

    again = UNet2DConditionModel.from_pretrained(tmp_path / "saved", subfolder="unet")
    assert torch.equal(UnetAdapter(pipeline_of(again)).velocity(), adapter.velocity())
