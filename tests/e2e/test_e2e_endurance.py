"""Runs that get no further end by themselves: a named error, and nothing lost of what there was."""

from pathlib import Path

import pytest
from processes import naming
from real_runs import SMALL, Run, Runner, assert_balanced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REWARDS = """
from pathlib import Path

def moody(sample):
    match Path(__file__).with_name("mood").read_text():
        case "away": raise ConnectionRefusedError("the judge is away")
        case "equal": return 1.0
        case "nan": return float("nan")
        case "raise": return sample.nothing
    return float(len(sample.response) % 3)
"""


class Moody:
    """A reward whose mood a test changes while a run goes on."""

    def __init__(self, folder: Path, mood: str) -> None:
        self._mood = folder / "mood"
        file = folder / "mine.py"
        file.write_text(REWARDS)
        self.change(mood)
        self.setting = f"reward.rewards=[{{kind='python', function='{file}:moody'}}]"

    def change(self, mood: str) -> None:
        new = self._mood.with_name("new")
        new.write_text(mood)
        new.replace(self._mood)


def ended(run: Run, code: int, *, words: tuple[str, ...]) -> None:
    """Look at the end of a run: its exit code and words, its books, and that nobody is left."""
    assert run.finish() == code, run.logs()
    for word in words:
        assert word in run.text, run.text[-3000:]
    assert "Traceback" not in run.text
    assert_balanced(run.report["books"])
    assert naming(str(run.output)) == []


@pytest.mark.parametrize(
    ("mood", "said", "is_validated"),
    [
        ("nan", "ValueError: the reward is nan", "true"),
        ("raise", "AttributeError: 'RewardInput' object has no attribute 'nothing'", "false"),
    ],
)
def test_a_reward_that_gives_no_sample_a_number_ends_the_run_with_its_name(
    runner: Runner, tmp_path: Path, mood: str, said: str, is_validated: str
) -> None:
    before = f"validation.before={is_validated}"
    run = runner.start(*SMALL, Moody(tmp_path, mood).setting, before)
    named = ("no sample has a reward: 'moody' gave none of the first 64 a finite number", said)
    ended(run, 2, words=("stopped at step 0", *named, "correct the reward"))
    assert run.report["steps"] == 0
    assert run.report["books"]["consumed"] == 0
    if is_validated == "false":  # those of 8 groups of 4 samples may have been in work
        (failed,) = run.report["failures"].items()
        assert failed[0] == "reward moody: AttributeError"
        assert 64 <= failed[1] < 64 + 8 * 4


@pytest.mark.parametrize(
    ("mood", "limit", "code", "words"),
    [
        (
            "equal",
            "endurance.equal_groups=50",
            2,
            ("no group has rewards that differ: those of the last ", "look at the samples"),
        ),
        (
            "away",
            "endurance.failing_s=5",
            1,
            (
                "nothing but failures for ",
                "the last with: reward moody: ConnectionRefusedError: the judge is away",
                "go on with --resume",
            ),
        ),
        (
            "nan",
            "endurance.unrewarded_in_a_row=64",
            2,
            (
                "no sample has a reward any more: 'moody' gave none of the last ",
                "reward moody: ValueError: the reward is nan",
                "correct the reward",
            ),
        ),
    ],
)
def test_a_run_that_gets_no_further_ends_with_a_checkpoint_that_goes_on(
    runner: Runner, tmp_path: Path, mood: str, limit: str, code: int, words: tuple[str, ...]
) -> None:
    moody = Moody(tmp_path, "well")
    settings = (
        *SMALL,
        moody.setting,
        limit,
        "trainer.drop_zero_signal=true",
        "trainer.steps=60",
        "validation.before=false",
        "validation.after=false",
    )
    run = runner.start(*settings)
    run.wait_for(lambda: run.steps_done() >= 2)
    moody.change(mood)
    ended(run, code, words=words)
    steps = run.report["steps"]
    assert 2 <= steps < 60
    assert run.report["books"]["consumed"] == 8 * steps
    newest = max(int(path.name.rpartition("-")[2]) for path in run.output.glob("checkpoints/*"))
    assert newest == steps - 1, "numbered from 0"
    moody.change("well")
    again = runner.start(*settings, f"trainer.steps={steps + 1}", flags=("--resume",))
    assert again.finish() == 0, again.logs()
    assert again.report["steps"] == steps + 1
    assert again.report["books"]["consumed"] == 8 * (steps + 1)


def test_a_run_that_nobody_joins_ends_and_says_who_is_missing(runner: Runner) -> None:
    waits = ("weight_sync.deadline_s=3", "launch.start_s=3", "cluster.join_s=3")
    run = runner.start(*SMALL, "launch.external=true", "endurance.standstill_s=3", *waits)
    missing = "it has waited for 1 of 1 policy replicas to join"
    ended(run, 1, words=("the run gets no further: for ", missing, "endurance.standstill_s"))
