"""Rewards that give no sample a number any more, after they have: a run of that ends."""

from dataclasses import replace

from control_run import AWAY, CONFIG, NAN, SHORT, Run, fail_until_stopped, unrewarded

from cosmos_core.control import FAILING, UNREWARDED, ControllerConfig
from cosmos_core.messages import Generate, ReplicaJoined

LATER = replace(
    CONFIG, endurance=replace(SHORT, unrewarded_in_a_row=40, failing_s=3600, equal_groups=0)
)


def begun_well(config: ControllerConfig = LATER, *, slots: tuple[int, ...] = (4,)) -> Run:
    """A run that has trained on samples of each of its rollouts, and gives out other groups."""
    run = Run(replace(config, groups_per_step=8), has_rollout=False)
    for index, each in enumerate(slots):
        run.tell(ReplicaJoined(replica=f"rollout-{index}", role="rollout", slots=each))
        run.answer(0.0, 1.0)
    return run


def answer_badly(run: Run, most: int) -> int:
    """Give no sample a number, by the reward's fault, until the run stops; return the samples."""
    for count in range(most):
        for _ in range(60):
            if run.asked or run.stopping:
                break
            run.wait(1)
        if run.stopping:
            return 2 * count
        unrewarded(run)
        run.wait(1)
    return 2 * most


def test_a_reward_that_gives_no_sample_a_number_any_more_ends_the_run_and_is_named() -> None:
    run = begun_well()
    began_s = run.now
    run.restart()
    assert answer_badly(run, 100) == 40
    assert run.stopping == (
        f"{UNREWARDED} any more: 'mine' gave none of the last 40 a finite number; of the last it "
        f"is said: {NAN}"
    )
    assert run.now - began_s < 60, "replicas do not rest of it"
    assert run.end() == run.stopping


def test_every_so_many_samples_with_a_reward_are_enough_to_go_on() -> None:
    run = begun_well()
    for _ in range(10):
        answer_badly(run, 19)
        run.answer(NAN, 1.0, unrewarded_by="mine")
    assert run.stopping == ""
    assert answer_badly(run, 100) == 40


def test_a_reward_service_that_is_away_in_mid_run_is_waited_for() -> None:
    run = begun_well()
    assert fail_until_stopped(run, 2000) >= 2000
    assert run.controller.state.endurance.unrewarded_in_a_row == 0
    assert run.stopping == ""
    while not run.asked:
        run.wait(1)
    run.answer(0.0, 1.0)
    assert run.controller.state.endurance.failed == 0


def test_samples_that_failed_otherwise_neither_count_nor_end_a_row() -> None:
    run = begun_well()
    assert answer_badly(run, 10) == 20
    assert run.controller.state.endurance.unrewarded_in_a_row == 20
    run.answer(AWAY, AWAY)
    assert run.controller.state.endurance.unrewarded_in_a_row == 20
    assert answer_badly(run, 100) == 20


def test_one_rollout_whose_rewards_are_broken_ends_no_run_and_rests() -> None:
    """It fails at once, where the other takes a minute for each of its groups."""
    run = begun_well(slots=(1, 2))
    num_bad = 0
    for minute in range(20):
        slow = [g for g in run.asked if held_by(run, g) == "rollout-0"]
        for _ in range(60):
            run.wait(1)
            for group in [g for g in run.asked if held_by(run, g) == "rollout-1"]:
                run.asked.remove(group)
                run.asked.insert(0, group)
                run.answer(NAN, NAN, unrewarded_by="mine", replica="rollout-1")
                num_bad += 1
        assert run.stopping == "", minute
        run.asked.remove(slow[0])
        run.asked.insert(0, slow[0])
        run.answer(0.0, 0.0)
    assert run.controller.state.replicas["rollout-1"].failures > 10
    assert 20 < num_bad < 200


def held_by(run: Run, command: Generate) -> str:
    return run.controller.state.groups[command.group.ordinal].replica


def test_without_that_limit_failures_are_waited_for_as_long_as_others() -> None:
    run = begun_well(replace(LATER, endurance=replace(SHORT, unrewarded_in_a_row=0)))
    began_s = run.now
    answer_badly(run, 200)
    assert 100 <= run.now - began_s < 150
    assert run.stopping.startswith(FAILING)
