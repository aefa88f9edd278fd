"""How a run that ended before its last step ends its command: which error, which exit code."""

import pytest
from real_runs import SUMS

from cosmos_app.ended import require_all_done
from cosmos_app.errors import (
    REFUSED,
    STOPPED,
    DeadlyStepError,
    EqualRewardsError,
    FailingGroupsError,
    InterruptedRunError,
    RunError,
    StandstillError,
    UnrewardedSamplesError,
    UnusablePromptsError,
    exit_code_of,
)
from cosmos_app.recipe import controller_config, load_recipe
from cosmos_core.config import ConfigError
from cosmos_core.control import ALL_DONE, DEADLY, EQUAL, FAILING, STANDSTILL, UNREWARDED, UNUSABLE
from cosmos_core.control.ending import LOST


def test_a_run_that_has_taken_all_its_steps_is_no_error() -> None:
    require_all_done(ALL_DONE, 7)


@pytest.mark.parametrize(
    ("finished", "kind", "code", "advice"),
    [
        ("ctrl-c", InterruptedRunError, STOPPED, "go on with --resume"),
        (f"{UNUSABLE}: 100 in a row", UnusablePromptsError, REFUSED, "Look at data, tokenizer"),
        (f"{UNREWARDED}: 'mine' gave", UnrewardedSamplesError, REFUSED, "correct the reward"),
        (f"{EQUAL}: those of the", EqualRewardsError, REFUSED, "look at the samples and their"),
        (f"{FAILING} for 3601 s: 9", FailingGroupsError, 1, "--resume once that is mended"),
        (f"{STANDSTILL}: for 14400 s", StandstillError, 1, "endurance.standstill_s says how"),
        (f"{DEADLY} step 3: 20 attempts", DeadlyStepError, 1, "endurance.step_attempts says how"),
        (f"{STANDSTILL}: for 9 s; {LOST}", StandstillError, 1, LOST),
    ],
)
def test_each_end_has_its_error_its_exit_code_and_what_to_do(
    finished: str, kind: type[RunError], code: int, advice: str
) -> None:
    with pytest.raises(kind) as raised:
        require_all_done(finished, 3)
    assert str(raised.value).startswith(f"stopped at step 3: {finished}")
    assert advice in str(raised.value)
    assert exit_code_of(raised.value) == code


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ((), "launch.start_s 3600"),
        (("weight_sync.deadline_s=7200",), "weight_sync.deadline_s 7200"),
        (("launch.start_s=60", "launch.external=true"), "cluster.join_s 1800"),
    ],
)
def test_a_standstill_shorter_than_a_start_or_a_load_is_refused(settings, longest) -> None:
    words = rf"endurance.standstill_s is 100 and {longest}: a run would end for whom that setting"
    with pytest.raises(ConfigError, match=words):
        load_recipe(SUMS, ["endurance.standstill_s=100", *settings])


def test_a_standstill_may_be_short_where_starts_and_loads_are_and_none_is_no_limit() -> None:
    short = ["endurance.standstill_s=120", "launch.start_s=120"]
    assert load_recipe(SUMS, short).endurance.standstill_s == 120.0
    assert load_recipe(SUMS, ["endurance.standstill_s=0"]).endurance.standstill_s == 0.0


def test_limits_are_settings_of_the_recipe() -> None:
    config = controller_config(load_recipe(SUMS, ["endurance.failing_s=60"]), 0)
    assert config.endurance.failing_s == 60.0
    assert config.endurance.equal_groups == 1000
    with pytest.raises(ConfigError, match=r"standstill_s is -1\.0; it must be 0 \(for no limit\)"):
        load_recipe(SUMS, ["endurance.standstill_s=-1"])
