"""A small simulated system with an engine of one request, a larger one, and what controls them."""

from cosmos_core.control import ControllerConfig, StalenessConfig
from cosmos_core.control.config import StalenessName
from cosmos_core.simulation import EngineSpeed, LengthConfig, SystemConfig

ALIKE = LengthConfig(median=10.0, sigma=0.0)
# One request at a time, a token every 0.1 s, 10 tokens: a group of one sample takes 1 s.
SIMPLE = SystemConfig(
    rollouts=1,
    slots=1,
    speed=EngineSpeed(fixed_s=0.1, request_s=0.0, max_running=1),
    lengths=ALIKE,
    train_s=2.0,
    push_s=0.5,
    swap_s=0.25,
)
TAILED = SystemConfig(
    slots=8,
    speed=EngineSpeed(fixed_s=5e-3, request_s=0.3e-3, max_running=8),
    lengths=LengthConfig(median=32.0, sigma=0.7, longest=256),
    push_s=0.2,
    swap_s=0.005,
)


def controlled(
    depth: int, bound: int, policy: StalenessName = "block", *, groups: int = 1, samples: int = 1
) -> ControllerConfig:
    return ControllerConfig(
        num_steps=1_000_000,
        groups_per_step=groups,
        samples_per_group=samples,
        staleness=StalenessConfig(depth=depth, bound=bound, policy=policy),
        lease_s=1e9,
        first_lease_s=1e9,
    )
