"""Latents of a request, decoded to the pixels that rewards look at."""

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cosmos_wfm.errors import RewardRequestError, WfmConfigError
from cosmos_wfm.reward_wire import RewardRequest


class LatentDecoder:
    """Wan's VAE: turns requests of latents into those of videos, and leaves others alone."""

    def __init__(self, directory: str) -> None:
        """Load the VAE.

        Args:
            directory: of an ``AutoencoderKLWan``, such as ``vae/`` of a pipeline.

        Raises:
            WfmConfigError: if there is none.
        """
        diffusers: Any = importlib.import_module("diffusers")
        try:
            vae = diffusers.AutoencoderKLWan.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise WfmConfigError(f"{directory} is no AutoencoderKLWan: {error}") from error
        self._vae: Any = vae.requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(self, request: RewardRequest) -> RewardRequest:
        """Return the request with pixels.

        Raises:
            RewardRequestError: if its latents are not of this VAE.
        """
        if request.media_type != "latent":
            return request
        latents, channels = request.latents(), self._vae.config.z_dim
        if latents.shape[1] != channels:
            raise RewardRequestError(
                f"latents of {latents.shape[1]} channels, but the VAE here has {channels}"
            )
        pixels = self._vae.decode(latents.to(self._vae.dtype), return_dict=False)[0].float()
        media = (pixels * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
        return replace(request, media_type="video", media=np.ascontiguousarray(media))
