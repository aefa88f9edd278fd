"""What several families have alike: guidance, schedules, prompt enhancement, video latents."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.errors import PipelineError, WfmConfigError

TIMESTEPS = 1000
_HALF = (torch.bfloat16, torch.float16)


def interpolated(
    positive: Float[Tensor, "B C *s"], negative: Float[Tensor, "B C *s"], scale: float
) -> Float[Tensor, "B C *s"]:
    """Return negative + scale · (positive - negative), classifier-free guidance's usual form."""
    return negative + scale * (positive - negative)


def no_given_frames(given: Tensor | None, pipeline: str) -> None:
    """Refuse conditioning frames.

    Raises:
        PipelineError: if there are any.
    """
    if given is not None:
        raise PipelineError(f"{pipeline} takes no conditioning frames")


def call_denoiser(
    transformer: nn.Module, latents: Float[Tensor, "B C *s"], timestep: Tensor, **named: Tensor
) -> Float[Tensor, "B D *s"]:
    """Return a denoiser's prediction in float32, whatever type its weights have.

    Outside autocast what it is given is cast to the type of its first weight, but the timestep,
    which has no neighbour near it in half precision.

    Args:
        transformer: the denoiser, or what wraps it (DDP).
        latents: x.
        timestep: in the denoiser's own units.
        **named: its other arguments.
    """
    weights = (each.dtype for each in transformer.parameters() if each.is_floating_point())
    dtype = next(weights, latents.dtype)
    if _is_autocast(latents.device.type) or dtype not in _HALF:
        dtype = latents.dtype
    given = {n: each.to(dtype) if each.is_floating_point() else each for n, each in named.items()}
    prediction: Tensor = transformer(
        hidden_states=latents.to(dtype), timestep=timestep, return_dict=False, **given
    )[0]
    return prediction.float()


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def own_schedule(scheduler: Any, num_steps: int) -> Float[Tensor, " S"]:
    """Return the σ that a diffusers scheduler steps through; the scheduler stays as it is."""
    fresh = type(scheduler).from_config(scheduler.config)
    fresh.set_timesteps(num_steps)
    return fresh.sigmas.float()


def flow_shift(scheduler: Any, otherwise: float) -> float:
    """Return the shift that a scheduler is configured with, under either of its names.

    ``FlowMatchEuler`` calls it ``shift``, DPM and UniPC ``flow_shift``; Karras levels have none.
    """
    settings = scheduler.config
    if settings.get("use_karras_sigmas"):
        return otherwise
    return float(settings.get("flow_shift") or settings.get("shift") or otherwise)


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Return how many tokens texts have, special ones too, without a limit."""
    return [len(ids) for ids in tokenizer(list(texts), verbose=False)["input_ids"]]


class GemmaPrompts:
    """Prompts as SANA pipelines embed them, with an instruction in front of each.

    Attributes:
        max_tokens: of a prompt, without the instruction.
    """

    def __init__(self, pipeline: Any, max_tokens: int, instruction: Sequence[str] | None) -> None:
        """Take an instruction, or the one that the pipeline's call has by default.

        Args:
            pipeline: of SANA images or videos.
            max_tokens: of a prompt, without the instruction.
            instruction: put before each prompt; ``None`` for the pipeline's own.
        """
        parameters = inspect.signature(type(pipeline).__call__).parameters
        own: Sequence[str] = parameters["complex_human_instruction"].default
        self._pipeline = pipeline
        self.max_tokens = max_tokens
        self._instruction = list(own if instruction is None else instruction)

    def encode(self, prompts: Sequence[str]) -> TextCondition:
        """Return ``encoder_hidden_states`` [B, L, D] and ``encoder_attention_mask`` [B, L]."""
        return self._embedded(list(prompts), self._instruction)

    def lengths(self, prompts: Sequence[str]) -> list[int]:
        """Return how many tokens each prompt has without the instruction, as ``max_tokens`` counts.

        Two of the instruction's are counted with the prompt, as the pipeline does.
        """
        tokenizer, before = self._pipeline.tokenizer, "\n".join(self._instruction)
        cleaned: list[str] = self._pipeline._text_preprocessing(list(prompts), clean_caption=False)
        found = token_counts(tokenizer, [before + each for each in cleaned])
        less = len(tokenizer.encode(before)) - 2 if self._instruction else 0
        return [each - less for each in found]

    def empty(self, num: int) -> TextCondition:
        """Return empty prompts without instruction."""
        return self._embedded([""] * num, [])

    @torch.no_grad()
    def _embedded(self, prompts: list[str], instruction: list[str]) -> TextCondition:
        embeds, mask, _, _ = self._pipeline.encode_prompt(
            prompts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_tokens,
            complex_human_instruction=instruction,
        )
        return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}


def without_learned_variance(
    prediction: Float[Tensor, "B D *s"], latents: Float[Tensor, "B C *s"]
) -> Float[Tensor, "B C *s"]:
    """Return the velocity of a SANA transformer, of which some predict a variance behind it."""
    return prediction[:, : latents.shape[1]]


def latent_constants(vae: Any) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of a video VAE's latents, [1, C, 1, 1, 1].

    Wan's VAE has them in its config, LTX2's as buffers; others are used as they are.
    """
    settings = vae.config
    if "latents_mean" in settings and settings["latents_mean"] is not None:
        mean, std = torch.tensor(settings["latents_mean"]), torch.tensor(settings["latents_std"])
    elif getattr(vae, "latents_mean", None) is not None:
        mean, std = vae.latents_mean, vae.latents_std
    else:
        mean, std = torch.zeros(1), torch.ones(1)
    shape = (1, -1, 1, 1, 1)
    return mean.float().view(shape).to(vae.device), std.float().view(shape).to(vae.device)


def wan_latents(adapter: DiffusionModelAdapter, latents: Tensor) -> Float[Tensor, "B C f h w"]:
    """Return latents as Wan's VAE itself has them, without the model's normalisation.

    Raises:
        PipelineError: if the model has another VAE: what decodes them elsewhere is Wan's.
    """
    check_wan_vae(adapter)
    mean, std = latent_constants(adapter.pipeline.vae)
    return latents * std + mean


def check_wan_vae(adapter: DiffusionModelAdapter) -> None:
    """Refuse a model whose latents nobody elsewhere can decode.

    Raises:
        PipelineError: if its VAE is not Wan's.
    """
    vae = type(adapter.pipeline.vae).__name__
    if not vae.endswith("AutoencoderKLWan"):
        raise PipelineError(f"reward_service.send is latents, of Wan's VAE; this model has a {vae}")


@torch.no_grad()
def encode_video(vae: Any, pixels: Float[Tensor, "B 3 *S"]) -> Float[Tensor, "B C f h w"]:
    """Return (z - mean) / std of the posterior's mode, float32; an image is one frame."""
    if pixels.dim() == 4:
        pixels = pixels.unsqueeze(2)
    encoded = vae.encode(pixels.to(vae.device, vae.dtype))
    mode = getattr(encoded, "latent_dist", None)
    mean, std = latent_constants(vae)
    return ((mode.mode() if mode is not None else encoded.latent).float() - mean) / std


@torch.no_grad()
def decode_video(vae: Any, latents: Float[Tensor, "B C f h w"]) -> Float[Tensor, "B 3 F H W"]:
    """Return pixels of z = latents · std + mean, not clipped."""
    mean, std = latent_constants(vae)
    return vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0].float()


def video_latent_shape(
    channels: int, frames: int, size: tuple[int, int], factors: tuple[int, int]
) -> tuple[int, ...]:
    """Return (C, f, h, w) for ``factors`` (temporal, spatial) of a VAE.

    Raises:
        PipelineError: if the frames are not 1 and a multiple of the temporal factor.
    """
    temporal, spatial = factors
    check_frames(frames, temporal)
    return (channels, (frames - 1) // temporal + 1, size[0] // spatial, size[1] // spatial)


def check_pixels(
    subject: str, size: tuple[int, int], frames: int, adapter: DiffusionModelAdapter
) -> None:
    """Refuse height and width, or a number of frames, that a model has no latents for.

    Raises:
        WfmConfigError: names the subject, and says which are right.
    """
    multiple, (height, width) = adapter.size_multiple, size
    if height % multiple or width % multiple or height < 1 or width < 1:
        raise WfmConfigError(
            f"{subject}: {height}x{width} pixels, but this model needs multiples of {multiple}"
        )
    try:
        check_frames(frames, adapter.temporal_factor)
    except PipelineError as error:
        raise WfmConfigError(f"{subject}: {error}") from error


def check_frames(frames: int, temporal: int) -> None:
    """Refuse a number of frames that a model has no latents for.

    Raises:
        PipelineError: names the nearest lengths that are right.
    """
    if frames < 1:
        raise PipelineError(f"{frames} frames; there must be 1 or more")
    if temporal == 0 and frames != 1:
        raise PipelineError(f"{frames} frames, but this is a model of images: 1 frame")
    if temporal and (frames - 1) % temporal:
        low = (frames - 1) // temporal * temporal + 1
        raise PipelineError(
            f"{frames} frames, but this model needs 1 and a multiple of {temporal}, for instance "
            f"{low} or {low + temporal}"
        )
