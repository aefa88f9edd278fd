"""One run whose reward raises or hangs on some samples of a prompt: they are lost, or all anew.

A third of the prompts lose one of their four samples and a third two; a prompt needs three. Their
reward fails on the first ones that it sees of a prompt, so that another attempt at one succeeds. It
hangs on one sample of a few prompts of the other third.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from real_runs import SMALL, Run, Runner, assert_balanced

from cosmos_app.event_log import read_events
from cosmos_core.simulation import StepTaken, read_log

STEPS, GROUPS, SAMPLES, NEEDED = 6, 8, 4, 3
HANGING = 24
"""One of so many prompts has a sample whose reward hangs."""
REWARD = """
import time
from pathlib import Path


def score(sample):
    seen = Path(__file__).with_name(f"{sample.prompt}.seen")  # outlives a worker
    if sample.fields["hangs"]:
        if len(sample.response) > 2 and not seen.exists():  # its siblings say something else
            seen.write_text(sample.response)
        if seen.exists() and seen.read_text() == sample.response:
            time.sleep(3600)
        return 1.0
    with seen.open("a") as marks:
        marks.write("x")
    if seen.stat().st_size <= sample.fields["num_bad"]:
        raise RuntimeError("this response displeases me")
    return float(sum(map(ord, sample.response)) % 7)
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One worker, which sees all samples of a prompt, and prompts enough for each to come once."""
    folder = tmp_path_factory.mktemp("siblings")
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {"prompt": f"word {n}", "answer": "3", "num_bad": n % 3, "hangs": n % HANGING == 0}
        for n in range(150)
    ]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Runner(folder, forks=True).complete(
        *SMALL,
        f"trainer.steps={STEPS}",
        f"trainer.min_group_samples={NEEDED}",
        f"data.path={folder}/words.jsonl",
        "data.held_out=0",
        f"reward.rewards=[{{kind='python', function='{folder}/reward.py:score', name='mine'}}]",
        "reward.num_workers=1",
        "reward.timeout_s=1.5",
    )


def answers(run: Run) -> list[dict[str, Any]]:
    return [e for e in read_events(run.output / "events.jsonl") if e["type"] == "GroupFinished"]


def with_failures(found: Sequence[dict[str, Any]], num_failed: int) -> list[dict[str, Any]]:
    return [answer for answer in found if answer["num_failed"] == num_failed]


def test_a_sample_whose_reward_raises_costs_itself_and_its_siblings_are_trained_on(
    run: Run,
) -> None:
    found = answers(run)
    one_lost = with_failures(found, 1)
    assert len(one_lost) >= STEPS
    assert {e["num_samples"] for e in one_lost} == {SAMPLES - 1}
    groups = [e["group"] for e in found if e["num_samples"] >= NEEDED]
    assert len(groups) == len(set(groups)), "none of them was sampled again"
    log = read_log(sorted((run.output / "spans").iterdir()))
    steps = [record for record in log if isinstance(record, StepTaken)]
    assert len(steps) == STEPS
    trained = sum(len(step.samples) for step in steps)
    usable = [e for e in found if e["num_samples"] >= NEEDED]
    assert len(usable) == STEPS * GROUPS, "all of them were trained on"
    assert trained == sum(e["num_samples"] for e in usable)
    assert trained == STEPS * GROUPS * SAMPLES - len(with_failures(usable, 1))


def test_a_prompt_with_fewer_samples_than_it_needs_is_sampled_again(run: Run) -> None:
    found = answers(run)
    two_lost = with_failures(found, 2)
    assert two_lost
    assert {e["attempt"] for e in two_lost} == {0}
    whole = {e["group"]: e["num_samples"] for e in found if e["attempt"] == 1}
    assert set(whole.values()) == {SAMPLES}, "the second attempt has all of its rewards"
    assert whole.keys() <= {e["group"] for e in two_lost}
    assert {e["attempt"] for e in found} == {0, 1}


def test_a_sample_whose_reward_hangs_costs_itself_and_none_of_its_siblings(run: Run) -> None:
    """The worker that is killed for it had rewards of others in hand, which are computed anew."""
    found, hung = answers(run), run.report["failures"]["reward mine: TimeoutError"]
    data = run.output.with_name("words.jsonl")
    hanging = [r["prompt"] for r in map(json.loads, data.read_text().splitlines()) if r["hangs"]]
    tried = [prompt for prompt in hanging if data.with_name(f"{prompt}.seen").exists()]
    assert 0 < hung <= len(tried), "none was tried twice"
    assert len(with_failures(found, 1)) > hung
    assert max(e["num_failed"] for e in found) == 2


def test_failed_samples_are_counted_and_shown_and_no_prompt_is_lost(run: Run) -> None:
    report, found = run.report, answers(run)
    assert report["steps"] == STEPS
    assert_balanced(report["books"])
    assert report["books"]["consumed"] == STEPS * GROUPS
    assert sum(report["books"]["dropped"].values()) == 0
    failed = sum(e["num_failed"] for e in found)
    hung = report["failures"]["reward mine: TimeoutError"]
    raised = failed - hung
    assert report["failures"] == {
        "reward mine: RuntimeError": raised,
        "reward mine: TimeoutError": hung,
    }
    said = " ".join(run.text.split())
    assert f"{raised} of reward mine: RuntimeError" in said
    assert f"{hung} of reward mine: TimeoutError" in said
    assert report["incidents"] == []
