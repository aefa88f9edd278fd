"""The simulator against cases worked out by hand, and the shape of what staleness policies give."""

from dataclasses import replace
from pathlib import Path

import pytest
from simulated import SIMPLE, TAILED, controlled

from cosmos_core.control import ControllerConfig, StalenessConfig
from cosmos_core.control.config import StalenessName
from cosmos_core.simulation import (
    Capacity,
    EngineSpeed,
    Figures,
    QueueDepths,
    SimulationError,
    Span,
    StepTaken,
    SystemConfig,
    TooShortError,
    TrainedSample,
    figures_of,
    generate_bound_s,
    read_log,
    simulate,
    step_bound_s,
    write_log,
)


def run(
    config: ControllerConfig, system: SystemConfig, *, steps: int = 12, skip: int = 4
) -> Figures:
    speed = system.speed
    capacity = Capacity(
        rollouts=system.rollouts, tokens_per_s=speed.full_rate, max_running=speed.max_running
    )
    return figures_of(simulate(config, system, steps=steps), capacity, skip=skip)


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    """1 s to generate, 2 s to train, 0.5 s to push, 0.25 s to swap: 3.75 s, 2 of them trained."""
    found = run(controlled(0, 0), SIMPLE)
    assert found.step_s == pytest.approx(3.75)
    assert found.policy_idle == pytest.approx(1.75 / 3.75)
    assert found.rollout_idle_tokens == pytest.approx(2.75 / 3.75)
    assert found.staleness_first.max == 0


def test_messages_and_scores_add_to_a_synchronous_step() -> None:
    """Six messages of 0.01 s lie on the way round, and a score of 0.1 s.

    They are: group finished, train, published, load, loaded, generate.
    """
    found = run(controlled(0, 0), replace(SIMPLE, message_s=0.01, score_s=0.1))
    assert found.step_s == pytest.approx(3.75 + 6 * 0.01 + 0.1)


@pytest.mark.parametrize(
    ("train_s", "step_s"),
    [
        (2.0, 2.5),  # the policy's 2 s and its 0.5 s of push; generation hides in them
        (0.5, 1.75),  # the engine's 1 s, and 0.75 s in which it stands still
    ],
)
def test_one_step_off_hides_the_shorter_side_but_no_push(train_s: float, step_s: float) -> None:
    found = run(controlled(1, 1), replace(SIMPLE, push="blocking", train_s=train_s))
    assert found.step_s == pytest.approx(step_s)
    assert found.push_policy_ms == pytest.approx(500.0)
    assert found.push_rollout_ms == pytest.approx(750.0)


@pytest.mark.parametrize(
    ("train_s", "step_s", "policy_idle"),
    [
        (2.0, 2.0, 0.0),  # the policy is the slower side
        (0.5, 1.25, 0.75 / 1.25),  # the engine is: 1 s of tokens and 0.25 s of swap
    ],
)
def test_a_staged_push_costs_the_swap_alone(
    train_s: float, step_s: float, policy_idle: float
) -> None:
    found = run(controlled(2, 4), replace(SIMPLE, train_s=train_s))
    assert found.step_s == pytest.approx(step_s)
    assert found.policy_idle == pytest.approx(policy_idle)
    assert found.swap_ms.p50 == pytest.approx(250.0)
    assert found.push_policy_ms == 0.0


def test_a_snapshot_is_exposed_on_the_policy_only() -> None:
    found = run(controlled(2, 4), replace(SIMPLE, snapshot_s=0.1))
    assert found.step_s == pytest.approx(2.1)
    assert found.push_policy_ms == pytest.approx(100.0)


def test_a_larger_batch_takes_longer_for_each_token() -> None:
    """Two requests at once: 0.1 + 2 x 0.05 s a token, so both take 2 s; the bound says the same."""
    speed = EngineSpeed(fixed_s=0.1, request_s=0.05, max_running=2)
    system = replace(SIMPLE, speed=speed, train_s=0.0, push_s=0.0, swap_s=0.0)
    config = controlled(0, 0, samples=2)
    assert run(config, system).step_s == pytest.approx(2.0)
    assert generate_bound_s(config, system) == pytest.approx(2.0)
    assert step_bound_s(config, replace(system, train_s=3.0)) == pytest.approx(3.0)


def test_a_request_that_waits_for_room_starts_with_the_version_of_its_start() -> None:
    """The second sibling starts when the first is done, 1 s later; both are of version 0."""
    log = simulate(controlled(0, 0, samples=2), SIMPLE, steps=1)
    (step,) = [record for record in log if isinstance(record, StepTaken)]
    assert step.samples == (TrainedSample(10, 0, 0), TrainedSample(10, 0, 0))
    assert step.start_s == pytest.approx(0.5 + 0.25 + 2.0)


def test_every_generated_token_is_decoded_once() -> None:
    log = simulate(controlled(2, 4, groups=8, samples=4), TAILED, steps=10)
    last = [record for record in log if isinstance(record, QueueDepths)][-1]
    decoded = sum(record.tokens for record in log if isinstance(record, Span))
    in_work = decoded - last.generated_tokens
    assert 0 <= in_work <= 2 * 8 * 4 * 256


def test_the_spans_of_a_replica_follow_each_other_without_gap() -> None:
    log = simulate(controlled(2, 4, groups=8, samples=4), TAILED, steps=6)
    for name in ("policy-0", "rollout-0", "rollout-1"):
        spans = [record for record in log if isinstance(record, Span) and record.replica == name]
        ends = [span.end_s for span in spans]
        assert [span.start_s for span in spans[1:]] == pytest.approx(ends[:-1])


def test_the_policies_rank_as_they_should() -> None:
    """Heavy tail, both sides balanced: steps, staleness and bias of seven ways to run."""
    config = controlled(2, 4, groups=16, samples=4)
    system = replace(TAILED, train_s=generate_bound_s(config, TAILED))
    bound = step_bound_s(config, system)

    def arm(
        depth: int, most: int, policy: StalenessName = "block", push: str = "staged"
    ) -> Figures:
        staleness = StalenessConfig(depth=depth, bound=most, policy=policy)
        pushed = system if push == "staged" else replace(system, push="blocking")
        return run(replace(config, staleness=staleness), pushed, steps=60, skip=5)

    default = arm(2, 4)
    assert default.step_s <= 1.10 * bound
    assert max(default.policy_idle, default.rollout_idle_tokens) <= 0.05
    assert default.staleness_first.max <= 4
    assert default.length_ratio == pytest.approx(1.0, abs=0.02)
    assert default.dropped == 0
    synchronous, one_off = arm(0, 0, push="blocking"), arm(1, 1, push="blocking")
    assert synchronous.step_s > one_off.step_s > 1.1 * default.step_s
    assert arm(2, 4, push="blocking").step_s > 1.1 * default.step_s
    assert arm(1, 1).step_s > 1.1 * default.step_s  # one knob idles
    dropping = arm(1, 1, "drop")
    assert dropping.staleness_first.max <= 1
    assert dropping.dropped > 0.02
    assert dropping.length_ratio < 0.98


def test_the_same_arguments_give_the_same_log() -> None:
    config = controlled(2, 4, groups=4, samples=2)
    assert simulate(config, TAILED, steps=4) == simulate(config, TAILED, steps=4)


def test_figures_are_those_between_the_ends_of_two_steps() -> None:
    """Steps end at 1, 2 and 4; the first is left out, so 3 s with two steps count."""
    sample = TrainedSample(6, 0, 1)
    log = [
        StepTaken(step=0, start_s=0.0, end_s=1.0, samples=(TrainedSample(6, 0, 0),)),
        StepTaken(step=1, start_s=1.5, end_s=2.0, samples=(sample,)),
        StepTaken(step=2, start_s=2.0, end_s=4.0, samples=(sample,)),
        Span(role="policy", replica="p", activity="wait_data", start_s=0.0, end_s=1.5),
        _decoded(0.0, 2.0, tokens=8.0),
        Span(role="rollout", replica="r", activity="swap", start_s=2.0, end_s=2.5),
        _decoded(2.5, 4.0, tokens=6.0),
        _depths(dropped=1, consumed=3, samples=4, tokens=16, denied=2),
    ]
    found = figures_of(log, Capacity(rollouts=1, tokens_per_s=5.0, max_running=4), skip=1)
    assert found.steps == 2
    assert found.step_s == pytest.approx(1.5)
    assert found.steps_per_hour == pytest.approx(2400.0)
    assert found.policy_idle == pytest.approx(0.5 / 3)
    assert found.rollout_idle_tokens == pytest.approx(1 - 10.0 / 15.0)
    assert found.rollout_idle_slots == pytest.approx(1 - 2 * 2.5 / 12.0)
    assert found.push_rollout_ms == pytest.approx(250.0)
    assert found.swap_ms.p99 == pytest.approx(500.0)
    assert (found.staleness_first.max, found.staleness_last.max) == (2, 1)
    assert found.length_ratio == pytest.approx(6.0 / 4.0)
    assert found.dropped == pytest.approx(0.25)
    assert found.denied == pytest.approx(2.0)


def test_a_log_without_steady_steps_says_so() -> None:
    log = [StepTaken(step=0, start_s=0.0, end_s=1.0, samples=())]
    with pytest.raises(TooShortError, match="1 steps; 1 are left out"):
        figures_of(log, Capacity(rollouts=1, tokens_per_s=1.0, max_running=1), skip=1)


def test_a_log_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    log = simulate(controlled(0, 0), SIMPLE, steps=2)
    write_log(tmp_path / "a.jsonl", log[:3])
    write_log(tmp_path / "b.jsonl", log[3:])
    assert read_log([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]) == log


def test_a_system_that_stands_still_says_what_it_waits_for() -> None:
    config = replace(controlled(2, 4), num_policies=2)
    with pytest.raises(SimulationError, match="1 of 2 policy replicas to join"):
        simulate(config, SIMPLE, steps=1)


@pytest.mark.parametrize(
    "wrong", [{"rollouts": 0}, {"slots": 0}, {"train_s": -1.0}, {"environment_s": -1.0}]
)
def test_impossible_systems_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}"):
        SystemConfig(**wrong)  # pyright: ignore[reportArgumentType]


def test_an_engine_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0 s"):
        EngineSpeed(fixed_s=0.0, request_s=0.0)


def _decoded(start_s: float, end_s: float, *, tokens: float) -> Span:
    return Span(
        role="rollout",
        replica="r",
        activity="decode",
        start_s=start_s,
        end_s=end_s,
        width=2,
        tokens=tokens,
    )


def _depths(*, dropped: int, consumed: int, samples: int, tokens: int, denied: int) -> QueueDepths:
    return QueueDepths(
        time_s=4.0,
        waiting=0,
        generating=0,
        ready=0,
        training=0,
        denied=denied,
        dropped=dropped,
        consumed=consumed,
        generated_samples=samples,
        generated_tokens=tokens,
    )
