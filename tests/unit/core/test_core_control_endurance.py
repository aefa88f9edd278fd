"""Runs that get no further: how long they go on, what they say at their end, and who goes on."""

from dataclasses import replace

import pytest
from control_run import AWAY, CONFIG, NAN, SHORT, Run, fail_until_stopped, unrewarded

from cosmos_core.control import (
    EQUAL,
    FAILING,
    STANDSTILL,
    UNREWARDED,
    EnduranceConfig,
    StalenessConfig,
    ValidationPlan,
)
from cosmos_core.messages import (
    GroupFailed,
    LoadFailed,
    ReplicaJoined,
    ReplicaLeft,
    ScaleRequested,
    StepFinished,
    VersionLoaded,
    VersionPublished,
)

# ---------------------------------------------------------------- rewards that are none


def test_a_reward_that_gives_no_sample_a_number_ends_the_run_and_is_named() -> None:
    run = Run()
    for _ in range(3):
        unrewarded(run)
    assert run.stopping == ""
    unrewarded(run)  # at once: it is no fault of the replica, which does not rest
    assert run.stopping == (
        f"{UNREWARDED}: 'mine' gave none of the first 8 a finite number; of the last it is said: "
        f"{NAN}"
    )
    assert run.end() == run.stopping
    assert run.controller.books().consumed == 0


def test_one_number_ever_is_enough_to_go_on() -> None:
    run = Run(replace(CONFIG, min_group_samples=1))
    run.answer(NAN, 1.0, unrewarded_by="mine")
    for _ in range(20):
        while not run.asked:
            run.wait(1)
        unrewarded(run)
        run.controller.state.endurance.failing_s = 0.0  # that is another limit
    assert run.stopping == ""
    assert run.controller.state.endurance.unrewarded == 0


def test_rewards_that_are_away_are_waited_for_and_not_counted() -> None:
    run = Run()
    for _ in range(20):
        while not run.asked:
            run.wait(1)
        run.answer(AWAY, AWAY)
        run.controller.state.endurance.failing_s = 0.0
    assert run.stopping == ""


def test_samples_of_a_validation_count_too_and_a_restart_forgets_none() -> None:
    plan = ValidationPlan(num_prompts=8, before=True)
    run = Run(replace(CONFIG, validation=plan))
    for number in range(8):
        while not run.asked:
            run.wait(1)
        assert run.asked[0].group.source == "validation"
        assert run.stopping == ""
        run.restart()
        run.answer(NAN, unrewarded_by="mine")
        assert run.controller.state.endurance.unrewarded == number + 1
    assert run.stopping.startswith(UNREWARDED)


# ---------------------------------------------------------------- rewards that are all equal


def test_a_run_without_signal_ends_after_so_many_groups() -> None:
    config = replace(CONFIG, endurance=replace(SHORT, equal_groups=30))
    run = Run(config)
    for number in range(29):
        run.answer(1.0, 1.0)
        assert run.stopping == "", number
    run.restart()
    run.answer(0.0, 0.0)
    assert run.stopping.startswith(f"{EQUAL}: those of the last 30 in a row were all equal")
    assert run.end() == run.stopping
    assert run.controller.books().dropped == {"no signal": 30}


def test_a_hard_task_goes_on_as_long_as_one_group_in_so_many_has_a_signal() -> None:
    run = Run(replace(CONFIG, num_steps=4, endurance=replace(SHORT, equal_groups=30)))
    while not run.controller.state.stop:
        for _ in range(29):
            run.answer(0.0, 0.0)
        assert run.stopping == ""
        run.answer(0.0, 1.0)
        if run.trains:
            step = run.trains.pop().step
            run.tell(StepFinished(replica="policy-0", step=step))
            run.tell(VersionPublished(replica="policy-0", version=step + 1))
    assert run.stopping == "all steps done"
    assert run.controller.books().dropped == {"no signal": 8 * 29}


def test_twenty_for_each_group_in_work_are_waited_for() -> None:
    run = Run(replace(CONFIG, groups_per_step=64), has_rollout=False)
    run.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=4))
    for number in range(60):  # three others are in work when one comes back
        assert run.stopping == "", number
        run.answer(0.0, 0.0)
    assert run.stopping.startswith(f"{EQUAL}: those of the last 60 in a row")


# ---------------------------------------------------------------- failures for too long


def test_a_run_whose_groups_all_fail_ends_after_a_while_with_the_last_reason() -> None:
    run = Run()
    lasted_s = fail_until_stopped(run, 1000)
    assert 100 <= lasted_s < 150
    assert run.stopping.startswith(f"{FAILING} for 1")
    assert run.stopping.endswith(f"attempts at prompts in a row, the last with: {AWAY}")
    assert run.end() == run.stopping


def test_a_reward_service_that_comes_back_in_time_costs_nothing_but_the_time() -> None:
    run = Run()
    for _ in range(5):
        assert fail_until_stopped(run, 60) >= 60
        while not run.asked:
            run.wait(1)
        run.answer(0.0, 0.0)  # all equal: no signal, and no failure either
        assert run.controller.state.endurance.failed == 0
    assert run.stopping == ""


def test_engines_that_die_of_every_prompt_are_failures_too() -> None:
    run = Run()
    for _ in range(200):
        if run.stopping:
            break
        run.wait(5)
        run.asked.clear()
        run.tell(ReplicaLeft(replica="rollout-0", reason="signal 11 (SIGSEGV)"))
        run.wait(5)
        run.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=1))
    assert run.stopping.startswith(FAILING)
    assert "the last with: rollout-0: signal 11 (SIGSEGV)" in run.stopping


def test_a_group_that_takes_longer_than_others_take_to_fail_is_waited_for() -> None:
    run = Run(has_rollout=False)
    run.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=2))
    slow = run.asked.pop(1)
    assert fail_until_stopped(run, 350) >= 350
    assert run.stopping == ""
    run.asked.insert(0, slow)
    run.answer(0.0, 1.0)
    assert run.controller.state.endurance.failed == 0


def test_one_that_never_comes_back_is_waited_for_four_times_as_long() -> None:
    run = Run(has_rollout=False)
    run.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=2))
    run.asked.pop(1)
    lasted_s = fail_until_stopped(run, 1000)
    assert 400 <= lasted_s < 450
    assert run.stopping.startswith(FAILING)


def test_failures_are_counted_where_policies_are_missing_too() -> None:
    run = Run()
    run.tell(ReplicaLeft(replica="policy-0", reason="killed"))
    assert fail_until_stopped(run, 1000) < 150
    assert run.stopping.startswith(FAILING)


def test_failures_while_a_step_is_trained_are_not_counted() -> None:
    run = Run(replace(CONFIG, staleness=StalenessConfig(depth=1, bound=4)))
    run.answer(0.0, 1.0)
    run.answer(0.0, 1.0)
    assert run.trains
    assert fail_until_stopped(run, 1000) >= 1000
    assert run.stopping == ""
    run.tell(StepFinished(replica="policy-0", step=0))
    lasted_s = fail_until_stopped(run, 1000)
    assert 60 <= lasted_s < 150
    assert run.end() == run.stopping
    assert run.controller.books().consumed == 2


def test_without_limits_a_run_goes_on_for_ever() -> None:
    none = EnduranceConfig(unrewarded_samples=0, equal_groups=0, failing_s=0, standstill_s=0)
    run = Run(replace(CONFIG, endurance=none))
    for _ in range(100):
        while not run.asked:
            run.wait(1)
        unrewarded(run)
    for _ in range(100):
        while not run.asked:
            run.wait(1)
        run.answer(0.0, 0.0)
    run.tell(ReplicaLeft(replica="policy-0", reason="killed"))
    run.wait(1000)
    assert run.stopping == ""


# ---------------------------------------------------------------- nobody has anything to do


def test_a_run_ends_that_waits_for_a_rollout_in_vain() -> None:
    run = Run(has_rollout=False)
    run.wait(205)
    assert run.stopping == f"{STANDSTILL}: for 200 s it has waited for a rollout replica to join"
    assert run.end() == run.stopping


def test_a_run_ends_that_waits_for_policies_in_vain_and_names_who_is_there() -> None:
    run = Run(replace(CONFIG, num_policies=2))
    run.answer(0.0, 1.0)
    run.answer(0.0, 1.0)
    run.wait(205)
    assert run.stopping == (
        f"{STANDSTILL}: for 200 s it has waited for 1 of 2 policy replicas to join beside policy-0"
    )
    assert run.end() == run.stopping


def test_a_replica_that_joins_late_has_as_long_again() -> None:
    run = Run(replace(CONFIG, num_policies=2), has_rollout=False)
    run.wait(190)
    run.tell(ReplicaJoined(replica="policy-1", role="policy", endpoints=("here",)))
    run.wait(190)
    assert run.stopping == ""
    for _ in range(5):  # but not one that dies and joins again
        run.tell(ReplicaLeft(replica="policy-1", reason="killed"))
        run.tell(ReplicaJoined(replica="policy-1", role="policy", endpoints=("here",)))
        run.wait(5)
    assert run.stopping.startswith(STANDSTILL)


def test_a_run_whose_rollouts_somebody_has_scaled_to_none_waits_for_him() -> None:
    run = Run(has_rollout=False)
    run.tell(ScaleRequested(rollouts=0))
    run.wait(1000)
    assert run.stopping == ""
    run.tell(ScaleRequested(rollouts=1))
    run.wait(205)
    assert run.stopping.startswith(STANDSTILL)


def test_a_long_step_and_a_long_group_are_no_standstill() -> None:
    run = Run()
    run.wait(1000)
    run.answer(0.0, 1.0)
    run.answer(0.0, 1.0)
    run.wait(1000)
    assert run.stopping == ""


def test_a_run_with_many_prompts_that_fail_by_themselves_goes_on() -> None:
    """Those have a limit of their own; time is none of it."""
    run = Run()
    for _ in range(50):
        command = run.asked.pop(0)
        run.wait(5)
        run.tell(
            GroupFailed(
                replica="rollout-0",
                group=command.group,
                attempt=command.attempt,
                reason="too long",
                drop_as="prompt too long",
            )
        )
    assert run.stopping == ""


@pytest.mark.parametrize("name", ["unrewarded_samples", "equal_groups", "failing_s"])
def test_a_negative_limit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is -1; it must be 0 \(for no limit\) or more"):
        EnduranceConfig(**{name: -1})


def test_a_limit_of_attempts_at_a_step_is_refused_where_it_is_negative() -> None:
    with pytest.raises(ValueError, match=r"step_attempts is -1; it must be 0 \(for no limit\)"):
        EnduranceConfig(step_attempts=-1)


# ---------------------------------------------------------------- what is no failure, and is work


def test_a_rollout_that_dies_with_many_groups_is_no_row_of_failures_while_nobody_tries() -> None:
    """It is back without weights, and the policy that has them is away: that is waited for."""
    run = Run(replace(CONFIG, groups_per_step=8), has_rollout=False)
    run.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=4))
    assert len(run.asked) == 4
    for name in ("policy-0", "rollout-0"):
        run.tell(ReplicaLeft(replica=name, reason="the machine died"))
    run.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=4, version=-1))
    run.wait(150)
    assert run.controller.state.endurance.failed == 4
    assert run.stopping == "", "it said that there was nothing but failures"
    run.wait(100)
    assert run.stopping.startswith(f"{STANDSTILL}: for 200 s it has waited for 1 of 1 policy")


def bound_to_load() -> Run:
    """A run whose rollout may not sample before it has version 1, which it is told to load."""
    run = Run(replace(CONFIG, staleness=StalenessConfig(depth=0, bound=0)))
    for _ in range(2):
        run.answer(0.0, 1.0)
    run.tell(StepFinished(replica="policy-0", step=0))
    run.tell(VersionPublished(replica="policy-0", version=1))
    run.asked.clear()
    assert run.controller.state.replicas["rollout-0"].loading == 1
    return run


def test_a_load_that_is_under_way_is_no_standstill() -> None:
    run = bound_to_load()
    run.wait(1000)
    assert run.stopping == ""
    loaded = VersionLoaded(replica="rollout-0", version=1, transfer_s=1000.0, stall_s=0.0)
    run.tell(loaded)
    assert run.asked


def test_weights_that_nobody_can_load_are_a_standstill_however_long_each_try_takes() -> None:
    run = bound_to_load()
    for _ in range(50):
        if run.stopping:
            break
        run.wait(9)
        run.tell(LoadFailed(replica="rollout-0", version=1, reason="gone"))
        run.wait(2)
    assert run.stopping.startswith(f"{STANDSTILL}: for 200 s it has waited for version 1 to load")
