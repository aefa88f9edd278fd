"""What a simulation is told of an asynchronous system: speeds, lengths, transfers."""

import math
import random
from dataclasses import dataclass, field
from typing import Literal

from cosmos_core.control import ControllerConfig

CONTROLLER, POLICY = "controller", "policy-0"
_GROUPS_OF_A_MEAN = 512
_TIMES = (
    *("train_s", "fetch_s", "push_s", "swap_s", "snapshot_s"),
    *("message_s", "score_s", "environment_s"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpeed:
    """How fast an engine decodes: each request in a batch of b gets a token every ``step_s(b)``.

    Attributes:
        fixed_s: seconds of a step whatever the batch: reading the weights.
        request_s: further seconds for each request in the batch.
        max_running: most requests decoded at once; more wait in the engine.
    """

    fixed_s: float = 5e-3
    request_s: float = 0.3125e-3
    max_running: int = 16

    def __post_init__(self) -> None:
        """Refuse an engine that takes no time.

        Raises:
            ValueError: if a step would take no time, or nothing may run.
        """
        if self.fixed_s < 0 or self.request_s < 0 or self.step_s(1) <= 0 or self.max_running < 1:
            raise ValueError(
                f"fixed_s is {self.fixed_s}, request_s {self.request_s} and max_running "
                f"{self.max_running}; want a step of more than 0 s and at least 1 request"
            )

    def step_s(self, width: int) -> float:
        """Return the seconds between two tokens of each of ``width`` requests."""
        return self.fixed_s + width * self.request_s

    @property
    def full_rate(self) -> float:
        """Tokens per second of a full batch, the most there is."""
        return self.max_running / self.step_s(self.max_running)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthConfig:
    """Lengths of responses: lognormal, drawn anew for every sample but the same in every run.

    Attributes:
        median: tokens of the median response.
        sigma: of the logarithm; 0 for responses of one length.
        longest: most tokens.
        seed: of the draws.
    """

    median: float = 32.0
    sigma: float = 0.7
    longest: int = 256
    seed: int = 0

    def length(self, ordinal: int, sibling: int) -> int:
        """Return the tokens of a sample of the prompt of that ordinal."""
        draw = random.Random(f"{self.seed}/{ordinal}/{sibling}").gauss(0.0, self.sigma)
        return min(self.longest, max(1, round(self.median * math.exp(draw))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """Somebody is killed, and is there again later with nothing of what it had in memory.

    A policy has what it had at its last checkpoint (`ControllerConfig.checkpoint_every`), a
    controller all that it had committed. That a replica has died is told at once, and a transfer
    from a policy that dies is not interrupted.

    Attributes:
        name: ``rollout-0`` and so on, ``policy-0`` or ``controller``.
        at_s: seconds from the start until it dies.
        away_s: seconds until it is there again.
    """

    name: str
    at_s: float
    away_s: float

    def __post_init__(self) -> None:
        """Check the times.

        Raises:
            ValueError: if one is negative.
        """
        if self.at_s < 0 or self.away_s < 0:
            raise ValueError(
                f"{self.name} dies after {self.at_s} s and is away for {self.away_s} s; "
                "want 0 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemConfig:
    """The replicas around a controller, by what they take.

    Attributes:
        rollouts: rollout replicas.
        slots: groups that each holds at once.
        speed: of each engine.
        lengths: of responses.
        train_s: seconds of an optimizer step.
        fetch_s: seconds from the order to take a step until its samples are there.
        push_s: seconds from the order to load a version until it is there.
        push: ``staged`` transfers while both sides work; under ``blocking`` the engine stands
            still and the policy starts no step until the transfer is over.
        swap_s: seconds that an engine stands still to put a version in place.
        snapshot_s: seconds that the policy stands still to publish one.
        message_s: seconds of a message between a replica and the controller.
        score_s: seconds from the last token of a group until it is scored and stored.
        environment_s: mean seconds that an environment takes between the two turns which every
            sample then has, drawn from an exponential distribution; 0 for one turn and none.
        outages: who dies when; no two of the same overlap.
    """

    rollouts: int = 2
    slots: int = 12
    speed: EngineSpeed = field(default_factory=EngineSpeed)
    lengths: LengthConfig = field(default_factory=LengthConfig)
    train_s: float = 1.0
    fetch_s: float = 0.0
    push_s: float = 0.0
    push: Literal["staged", "blocking"] = "staged"
    swap_s: float = 0.0
    snapshot_s: float = 0.0
    message_s: float = 0.0
    score_s: float = 0.0
    environment_s: float = 0.0
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        """Check that there is somebody, and that time goes forward.

        Raises:
            ValueError: naming what is too small, or who cannot die, or not yet once more.
        """
        if self.rollouts < 1 or self.slots < 1:
            raise ValueError(f"rollouts is {self.rollouts} and slots {self.slots}; want at least 1")
        for name in _TIMES:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        self._check_outages()

    @property
    def rollout_names(self) -> tuple[str, ...]:
        """Names of the rollout replicas."""
        return tuple(f"rollout-{index}" for index in range(self.rollouts))

    def _check_outages(self) -> None:
        there_s = dict.fromkeys((CONTROLLER, POLICY, *self.rollout_names), 0.0)
        for outage in sorted(self.outages, key=lambda outage: outage.at_s):
            if outage.name not in there_s:
                raise ValueError(
                    f"outages has {outage.name!r}, who is not there: {', '.join(there_s)} are"
                )
            if outage.at_s < there_s[outage.name]:
                raise ValueError(
                    f"{outage.name} would die after {outage.at_s} s, but is away until "
                    f"{there_s[outage.name]} s"
                )
            there_s[outage.name] = outage.at_s + outage.away_s

    def turns(self, ordinal: int, sibling: int) -> tuple[int, ...]:
        """Return the tokens of each turn of a sample of the prompt of that ordinal.

        Two turns have the sample's length together, cut at a random place; one token is too few,
        and becomes two.
        """
        length = self.lengths.length(ordinal, sibling)
        if not self.environment_s:
            return (length,)
        draw = random.Random(f"turns/{self.lengths.seed}/{ordinal}/{sibling}")
        first = draw.randint(1, max(1, length - 1))
        return (first, max(1, length - first))

    def answer_s(self, ordinal: int, num_tokens: int) -> float:
        """Return the seconds that the environment takes to answer.

        They are drawn from what it has before it: the prompt of that ordinal, and a first turn of
        so many tokens.
        """
        if not self.environment_s:
            return 0.0
        draw = random.Random(f"answer/{self.lengths.seed}/{ordinal}/{num_tokens}")
        return draw.expovariate(1.0 / self.environment_s)


def generate_bound_s(config: ControllerConfig, system: SystemConfig) -> float:
    """Return the seconds that full engines take for the samples of a step.

    Lengths are those of the first 512 prompts, on average. An environment makes it no longer, since
    others are decoded meanwhile.
    """
    num_samples = config.groups_per_step * config.samples_per_group
    drawn = [
        sum(system.turns(ordinal, sibling))
        for ordinal in range(_GROUPS_OF_A_MEAN)
        for sibling in range(config.samples_per_group)
    ]
    tokens = num_samples * (sum(drawn) / len(drawn))
    return tokens / (system.rollouts * system.speed.full_rate)


def step_bound_s(config: ControllerConfig, system: SystemConfig) -> float:
    """Return the least seconds of a step: those of the slower side, were it never idle."""
    return max(system.train_s, generate_bound_s(config, system))
