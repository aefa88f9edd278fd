"""How samples are drawn, by whom, and on whose devices."""

from dataclasses import dataclass, field
from typing import Literal

from cosmos_app.errors import DataError
from cosmos_app.ranges import require_at_least
from cosmos_core.control import StalenessConfig
from cosmos_rollout import EngineConfig, EnvironmentConfig, EpisodeLimits, Sampling, VLLMConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How tokens are drawn.

    Attributes:
        temperature: of the softmax.
        top_p: nucleus sampling; 1 for none.
        max_new_tokens: longest response.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        self.build(0, ())

    def build(self, seed: int, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Return the sampling of a run with a seed, of a model whose answers end with a token."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=self.max_new_tokens,
            seed=seed,
            stop_token_ids=stop_token_ids,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """The replicas that generate.

    Attributes:
        replicas: how many.
        slots: groups that each generates at once.
        scoring: further groups that each may hold while their rewards are computed; for rewards
            that take long.
        engine: what generates.
        sampling: how.
        environment: what every episode is played in; none: one prompt, one reply.
        episode: what ends an episode that does not end by itself.
        shared_prefixes: train what several samples of a prompt begin with in ``each`` of them, or
            ``once``, in the first: for environments whose episodes are branches of one. Of samples
            drawn by themselves the later ones' advantages no longer count there.
        record: keep every trajectory under ``trajectories/`` of the run directory, to look into.
        colocate: share the policy's devices: engines sleep while it trains, their weights kept in
            host memory ("keep") or given up and fetched again ("discard"); it puts its own away
            while they generate. Empty: each has its own devices.
        turn_deadline_s: longest that one side waits for the other to let go of the devices.
    """

    replicas: int = 2
    slots: int = 32
    scoring: int = 0
    engine: EngineConfig = field(default_factory=VLLMConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    environment: EnvironmentConfig | None = None
    episode: EpisodeLimits = field(default_factory=EpisodeLimits)
    shared_prefixes: Literal["each", "once"] = "each"
    record: bool = False
    colocate: Literal["", "keep", "discard"] = ""
    turn_deadline_s: float = 3600.0

    def __post_init__(self) -> None:
        require_at_least(self, {"replicas": 1, "slots": 1, "scoring": 0})
        require_at_least(self, {"turn_deadline_s": 0.001})


def check_nucleus(config: RolloutConfig, validation_top_p: float) -> None:
    """Refuse nucleus sampling by an engine that would refuse every prompt of it.

    Raises:
        ValueError: naming the setting.
    """
    if config.engine.kind != "sglang":
        return
    asked = {
        "rollout.sampling.top_p": config.sampling.top_p,
        "validation.top_p": validation_top_p,
    }
    for setting, top_p in asked.items():
        if top_p < 1.0:
            raise ValueError(
                f"{setting} is {top_p} and rollout.engine.kind 'sglang', which does not tell the "
                "log-probabilities that tokens are drawn with then; set 1, or the engine 'vllm'"
            )


def require_trainable_engine(config: RolloutConfig) -> None:
    """Refuse to train with an engine that never gets what is trained.

    Raises:
        DataError: naming the setting.
    """
    if config.engine.kind == "endpoint":
        raise DataError(
            "rollout.engine.kind is 'endpoint': a server of somebody else keeps the weights it "
            "has, and would never sample from those that are trained; choose 'vllm', 'sglang' or "
            "'transformers'. 'cosmos-app evaluate' measures a server, teacher.urls learns from one"
        )


def check_colocation(
    config: RolloutConfig, staleness: StalenessConfig, *, num_policies: int
) -> None:
    """Refuse to take turns where nobody would ever be idle, or nobody can sleep.

    Args:
        config: of the rollouts.
        staleness: how far they may run ahead.
        num_policies: replicas that train.

    Raises:
        ValueError: naming the setting.
    """
    if not config.colocate:
        return
    what = f"rollout.colocate is {config.colocate!r}"
    if staleness.depth or staleness.bound:
        raise ValueError(
            f"{what}: generating and training take turns, which is staleness.depth = 0 and "
            f"staleness.bound = 0; found {staleness.depth} and {staleness.bound}"
        )
    if config.engine.kind in ("endpoint", "sglang"):
        raise ValueError(f"{what}: a server at the other end of HTTP cannot be put to sleep")
    if num_policies > 1:
        raise ValueError(f"{what}: one policy replica has the devices; found several")
