"""What lengths do to the rewards of a group, and what a recipe may ask of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_app.errors import DataError
from cosmos_app.length_reward import (
    LengthBudget,
    LengthCap,
    LengthScorer,
    RelativeLength,
    scorer_of,
)
from cosmos_app.prepare import check_inputs
from cosmos_app.recipe import load_recipe
from cosmos_core.config import ConfigError
from cosmos_rollout import Failure, RewardInput, RewardPoolConfig, Scored

FAILED = Failure(reward="exact", error="KeyError", message="'x'")


class Scores:
    """A scorer that has said all it has to say before."""

    async def score(self, sample):
        return Scored(rewards={"exact": 1.0}, total=1.0)

    async def score_group(self, samples, outcomes):
        return outcomes


def sample(num_tokens: int, **fields) -> RewardInput:
    return RewardInput(prompt="p", response="r", num_response_tokens=num_tokens, fields=fields)


def scored(total: float) -> Scored:
    return Scored(rewards={"exact": total}, total=total)


async def totals(config, samples, outcomes) -> list[float | Failure]:
    joined = await LengthScorer(Scores(), config).score_group(samples, outcomes)
    for before, after in zip(outcomes, joined, strict=True):
        if isinstance(after, Scored):
            changed = after.rewards["length_reward"]
            assert after.total == pytest.approx(before.total + changed)
    return [each.total if isinstance(each, Scored) else each for each in joined]


async def test_shorter_right_answers_gain_longer_ones_lose_and_wrong_ones_never_gain():
    samples = [sample(n) for n in (10, 20, 30, 10, 50)]
    outcomes = [scored(1.0), scored(1.0), scored(1.0), scored(0.0), FAILED]
    found = await totals(RelativeLength(weight=0.2), samples, outcomes)
    assert found == [pytest.approx(t) for t in (1.1, 1.0, 0.9, 0.0)] + [FAILED]


async def test_a_budget_costs_each_token_too_many_or_too_few():
    samples = [sample(n, budget=100) for n in (90, 100, 130)]
    found = await totals(LengthBudget(rate=0.01), samples, [scored(1.0)] * 3)
    assert found == pytest.approx([0.9, 1.0, 0.7])


async def test_a_cap_takes_from_the_reward_what_is_longer_than_it():
    samples = [sample(n, tokens=100) for n in (20, 100, 140, 400)]
    config = LengthCap(field="tokens", rate=0.01, offset=0.5)
    found = await totals(config, samples, [scored(1.0)] * 3 + [scored(-1.0)])
    assert found == pytest.approx([1.0, 0.5, 0.1, 0.0])


@pytest.mark.parametrize("budget", [None, True, 12.5, "100", 0])
async def test_a_row_without_a_budget_costs_its_group_with_the_reason(budget):
    found = await totals(LengthBudget(), [sample(3, budget=budget)] * 2, [scored(1.0), FAILED])
    assert isinstance(found[0], Failure)
    assert f"field 'budget', found {budget!r}" in found[0].message
    assert found[1] == FAILED


def test_without_a_table_the_pool_scores_alone():
    pool = RewardPoolConfig().build()
    assert scorer_of(pool, None) is pool


def recipe_of(tmp_path: Path, rows: str, *overrides: str):
    (tmp_path / "rows.jsonl").write_text(rows)
    path = tmp_path / "recipe.toml"
    path.write_text("[length_reward]\nkind = 'budget'\n")
    return load_recipe(path, [f"data.path={tmp_path / 'rows.jsonl'}", *overrides])


def test_a_recipe_names_the_row_that_has_no_budget(tmp_path: Path) -> None:
    good = '{"prompt": "Use 20 tokens.", "answer": "1", "budget": 20}\n'
    check_inputs(recipe_of(tmp_path, good))
    bad = recipe_of(tmp_path, good + '{"prompt": "Be brief.", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"row 2: length_reward needs a number of tokens"):
        check_inputs(bad)
    with pytest.raises(DataError, match="sums that are generated have not"):
        check_inputs(replace(bad, data=replace(bad.data, path=None)))


@pytest.mark.parametrize("setting", ["rate=nan", "rate=-0.1", "kind=cap length_reward.offset=inf"])
def test_a_recipe_with_a_rate_that_is_none_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match="length_reward"):
        recipe_of(tmp_path, "", *f"length_reward.{setting}".split())
