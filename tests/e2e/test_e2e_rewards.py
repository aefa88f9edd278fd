"""A whole run with several rewards: programs in a sandbox, a pattern, a rank among siblings.

The model is a random one that likes three programs, each of which is a token. What every sample
earned is worked out here from its text.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from played_runs import END, acting_model
from real_runs import SMALL, Runner, assert_balanced
from transformers import AutoTokenizer

from cosmos_app.samples import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAMS = {
    f"```python\n{code}\n```\n": share
    for code, share in (
        ("print(int(input()) + 1)", 1.0),
        ("print(2)", 0.5),
        ("import os; os.kill(os.getpid(), 9)", 0.0),
    )
}
TESTS = [{"input": "1", "output": "2"}, {"input": "6", "output": "7"}]
RANK = """
def rank(samples):
    longest = max(len(sample.response) for sample in samples)
    return [len(sample.response) / longest if longest else 0.0 for sample in samples]
"""
REWARDS = (
    "{kind='code', score='share', timeout_s=10.0}",
    "{kind='format', pattern='.*```\\n', weight=0.5}",
    "{kind='length', target=2, limit=10, weight=0.25}",
)


def earned(text: str) -> float:
    """Return what the program is worth that comes last; digits alone are one that says nothing."""
    last = max(PROGRAMS, key=text.rfind)
    return PROGRAMS[last] if last in text else 0.0


def test_samples_of_a_run_earn_what_their_programs_their_form_and_their_siblings_say(
    runner: Runner, tmp_path: Path
) -> None:
    liked = {END: 1.0, "7": 0.9, **dict(zip(PROGRAMS, (1.0, 1.0, 0.9), strict=True))}
    acting_model(tmp_path / "model", liked)
    (tmp_path / "rank.py").write_text(RANK)
    rows = [{"prompt": f"go {word}", "tests": TESTS} for word in ("on", "up", "in") * 8]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = runner.complete(
        *SMALL,
        f"data.path={tmp_path / 'my.jsonl'}",
        f"model.path={tmp_path / 'model'}",
        "validation={before=false, after=false}",
        f"reward.rewards=[{', '.join(REWARDS)}]",
        f"reward.group_rewards=[{{function='{tmp_path / 'rank.py'}:rank', weight=0.125}}]",
        "reward.timeout_s=60",
        "rollout.record=true",
        "rollout.sampling.max_new_tokens=12",
        "trainer.steps=2",
        "trainer.groups_per_step=3",
        "staleness={depth=0, bound=0}",
    )
    assert run.report["steps"] == 2
    assert not run.report["failures"], "a program that is killed is a bad one, and no failure"
    assert_balanced(run.report["books"])
    (record,) = (run.output / "trajectories").glob("*.bin")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    groups = defaultdict(list)
    for trajectory in read_trajectories(record):
        tokens = trajectory.token_ids[trajectory.trainable].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        groups[trajectory.group].append((trajectory, text))
    assert len(groups) == 6
    seen = set()
    for siblings in groups.values():
        longest = max(len(text) for _, text in siblings)
        for trajectory, text in siblings:
            rewards = dict(trajectory.rewards)
            assert rewards.pop("code") == earned(text)
            assert rewards.pop("format") == float(text.endswith("```\n"))
            assert rewards.pop("rank") == pytest.approx(len(text) / longest if longest else 0.0)
            assert trajectory.reward == pytest.approx(
                earned(text)
                + 0.5 * text.endswith("```\n")
                + 0.25 * rewards.pop("length")
                + 0.125 * trajectory.rewards["rank"]
            )
            assert not rewards
            seen.add(earned(text))
    assert seen == {0.0, 0.5, 1.0}
