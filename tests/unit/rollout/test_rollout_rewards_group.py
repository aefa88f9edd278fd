"""Rewards of a whole group: who takes part, how values are added up, and what a bad one costs."""

import pytest
import pytest_asyncio

from cosmos_rollout import (
    ExactReward,
    Failure,
    GroupReward,
    PythonReward,
    RewardError,
    RewardInput,
    RewardPool,
    RewardPoolConfig,
    Scored,
)

USER = """
import math, time

def rank(samples):
    texts = [sample.response for sample in samples]
    if "raise" in texts: raise KeyError("lost")
    if "hang" in texts: time.sleep(1000)
    if "few" in texts: return [0.0]
    order = sorted(texts, key=len)
    return [math.nan if text == "nan" else float(order.index(text)) for text in texts]

def picky(sample):
    if sample.response == "bad": raise ValueError("bad")
    return 1.0
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "groups.py"
    path.write_text(USER)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(user_file):
    config = RewardPoolConfig(
        rewards=(PythonReward(function=f"{user_file}:picky"),),
        group_rewards=(GroupReward(function=f"{user_file}:rank", weight=0.5),),
        timeout_s=2.0,
    )
    pool = config.build()
    await pool.start()
    yield pool
    await pool.aclose()


FAILED = Failure(reward="exact", error="KeyError", message="'x'")


async def scored(pool, *texts):
    samples = [RewardInput(prompt="", response=text) for text in texts]
    return await pool.score_group(samples, [await pool.score(sample) for sample in samples])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_group_reward_is_added_with_its_weight(pool):
    assert await scored(pool, "ccc", "a", "bb") == [
        Scored(rewards={"picky": 1.0, "rank": 2.0}, total=2.0),
        Scored(rewards={"picky": 1.0, "rank": 0.0}, total=1.0),
        Scored(rewards={"picky": 1.0, "rank": 1.0}, total=1.5),
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sibling_that_failed_takes_no_part(pool):
    long, bad, short = await scored(pool, "cccccc", "bad", "a")
    assert isinstance(bad, Failure)
    assert (long.rewards["rank"], short.rewards["rank"]) == (1.0, 0.0)  # of two, not of three


@pytest.mark.asyncio(loop_scope="module")
async def test_a_value_that_is_not_a_number_costs_one_sibling(pool):
    fine, lost = await scored(pool, "a", "nan")
    assert isinstance(fine, Scored)
    message = "the reward is nan"
    assert lost == Failure(reward="rank", error="ValueError", message=message, is_own=True)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("raise", "KeyError", "'lost'"),
        ("hang", "TimeoutError", "no result within 2.0 s"),
        ("few", "RewardError", "1 values for a group of 2"),
    ],
)
async def test_a_group_reward_that_fails_costs_its_group_and_is_counted(pool, text, error, message):
    before = pool.failures.get(f"rank: {error}", 0)
    failure = Failure(reward="rank", error=error, message=message, is_own=error != "TimeoutError")
    assert await scored(pool, text, "a") == [failure, failure]
    assert pool.failures[f"rank: {error}"] == before + 2
    assert all(isinstance(outcome, Scored) for outcome in await scored(pool, "a", "b"))


async def test_a_pool_without_group_rewards_changes_nothing():
    pool = RewardPool(RewardPoolConfig())
    try:
        outcomes = [Scored(rewards={"exact": 1.0}, total=1.0), FAILED]
        samples = [RewardInput(prompt="", response="")] * 2
        assert await pool.score_group(samples, outcomes) == outcomes
    finally:
        await pool.aclose()


async def test_a_group_reward_that_takes_no_list_is_known_at_the_start(tmp_path):
    (tmp_path / "none.py").write_text("def nothing():\n    return []\n")
    reward = GroupReward(function=f"{tmp_path}/none.py:nothing", name="mine")
    pool = RewardPool(RewardPoolConfig(rewards=(ExactReward(),), group_rewards=(reward,)))
    try:
        with pytest.raises(RewardError, match=r"mine cannot be used.*samples: Sequence"):
            await pool.start()
    finally:
        await pool.aclose()


def test_names_are_distinct_over_both_kinds():
    with pytest.raises(ValueError, match=r"twice: \['exact'\]"):
        RewardPoolConfig(group_rewards=(GroupReward(function="m:f", name="exact"),))
