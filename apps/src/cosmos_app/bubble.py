"""How long both sides of a recipe would stand idle, and for a validation, from a simulation of it.

The simulator runs the recipe's own admission, in the real controller. Of speeds nothing is known
before a run, so it is told the case that depth and bound are for: rollouts and policy equally fast,
responses with a long tail, the median an eighth of the longest, and engines that are full with half
the samples of their slots, since siblings that are done leave the others alone in theirs.
"""

from dataclasses import dataclass, replace

from cosmos_app.recipe import Recipe
from cosmos_core.control import ControllerConfig, ValidationPlan
from cosmos_core.simulation import (
    Capacity,
    EngineSpeed,
    LengthConfig,
    Span,
    SystemConfig,
    figures_of,
    generate_bound_s,
    simulate,
    step_bound_s,
)

_MOST_ROLLOUTS = 4
_MOST_GROUPS = 64
_MOST_SAMPLES = 64
_MOST_TOKENS = 1024
_SKIP, _STEPS = 5, 20
_MOST_AHEAD = 64
_SIGMA, _LONGEST_TO_MEDIAN = 0.8, 8
_FOR_EVER = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubble:
    """Idle time as simulated.

    Attributes:
        policy: share of the policy's time.
        rollout: share of the tokens that full engines would have made.
        over_bound: time of a step over that of the slower side, were it never idle.
    """

    policy: float
    rollout: float
    over_bound: float


def predict_bubble(recipe: Recipe) -> Bubble:
    """Simulate a recipe's admission; a large one is made smaller, with the same proportions."""
    config, system = _reduced(recipe)
    speed = system.speed
    capacity = Capacity(
        rollouts=system.rollouts, tokens_per_s=speed.full_rate, max_running=speed.max_running
    )
    found = figures_of(simulate(config, system, steps=_STEPS), capacity, skip=_SKIP)
    return Bubble(
        policy=found.policy_idle,
        rollout=found.rollout_idle_tokens,
        over_bound=found.step_s / step_bound_s(config, system),
    )


def predict_validation_wait(recipe: Recipe, num_prompts: int) -> float:
    """Return for how long training waits for a validation in between, in least times of a step.

    Args:
        recipe: one of a run; its validations have answers as long as training has.
        num_prompts: that are answered.
    """
    config, system = _reduced(recipe)
    every = _SKIP + min(recipe.staleness.bound, _MOST_AHEAD)
    share = config.groups_per_step / recipe.trainer.groups_per_step
    plan = ValidationPlan(
        num_prompts=max(1, round(num_prompts * share)),
        num_samples=min(recipe.validation.samples, _MOST_SAMPLES),
        before=False,
        every=every,
    )
    validated = replace(config, num_steps=4 * every, validation=plan)
    log = simulate(validated, system, steps=2 * every)
    spans = [record for record in log if isinstance(record, Span) and record.activity == "eval"]
    return sum(span.end_s - span.start_s for span in spans) / step_bound_s(config, system)


def _reduced(recipe: Recipe) -> tuple[ControllerConfig, SystemConfig]:
    groups = recipe.trainer.groups_per_step
    samples = min(recipe.trainer.samples_per_group, _MOST_SAMPLES)
    rollouts = min(recipe.rollout.replicas, _MOST_ROLLOUTS)
    total_slots = recipe.rollout.replicas * recipe.rollout.slots
    reduced = min(groups, _MOST_GROUPS)
    slots = max(1, round(total_slots * reduced / groups / rollouts))
    longest = min(recipe.rollout.sampling.max_new_tokens, _MOST_TOKENS)
    config = ControllerConfig(
        num_steps=2 * _STEPS,
        groups_per_step=reduced,
        samples_per_group=samples,
        staleness=recipe.staleness,
        lease_s=_FOR_EVER,
        first_lease_s=_FOR_EVER,
    )
    width = max(1, slots * samples // 2)
    system = SystemConfig(
        rollouts=rollouts,
        slots=slots,
        speed=EngineSpeed(fixed_s=0.5, request_s=0.5 / width, max_running=width),
        lengths=LengthConfig(
            median=max(1.0, longest / _LONGEST_TO_MEDIAN), sigma=_SIGMA, longest=longest
        ),
    )
    train_s = generate_bound_s(config, system)
    return config, SystemConfig(
        rollouts=rollouts, slots=slots, speed=system.speed, lengths=system.lengths, train_s=train_s
    )
