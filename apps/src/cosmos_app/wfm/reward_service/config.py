"""What a reward service is started with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardServerConfig:
    """A reward service.

    Attributes:
        rewards: name of each reward to its ``module:function``, or to nothing if it is built in.
        host: address it listens on.
        port: its port; 0 for any free one.
        capacity: requests that may wait for a reward; more are refused.
        max_request_bytes: of a body.
        keep_s: how long scores can be fetched.
        hold_s: how long a fetch waits for scores before it is told to come back.
        deadline_s: for loading a reward, and for scoring one request.
        latent_vae: directory of the VAE that latents are decoded by; empty refuses latents.
        not_ready_status: what it is told then; 400 is what older clients know.
    """

    rewards: Mapping[str, str]
    host: str = "127.0.0.1"
    port: int = 0
    capacity: int = 64
    max_request_bytes: int = 1 << 30
    keep_s: float = 3600.0
    hold_s: float = 2.0
    deadline_s: float = 600.0
    latent_vae: str = ""
    not_ready_status: Literal[202, 400] = 202
