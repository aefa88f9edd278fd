"""Rewards that judge the rows of some data sets, in real worker processes."""

import pytest

from cosmos_rollout import (
    ExactReward,
    GroupReward,
    LengthReward,
    RewardInput,
    RewardPoolConfig,
    Scored,
)

CONFIG = RewardPoolConfig(
    rewards=(
        ExactReward(weight=2.0),
        ExactReward(name="loose", ignore_case=True),
        LengthReward(target=0, limit=4),
    ),
    sets={"exact": ("sums",), "loose": ("words", "names")},
)


def sample(data_set: str, response: str) -> RewardInput:
    return RewardInput(
        prompt="",
        response=response,
        answer="Yes",
        num_response_tokens=2,
        fields={"data_set": data_set} if data_set else {},
    )


@pytest.mark.parametrize(
    ("data_set", "judged"),
    [("sums", {"exact", "length"}), ("words", {"loose", "length"}), ("", {"length"})],
)
def test_a_reward_judges_the_rows_of_its_sets(data_set: str, judged: set[str]) -> None:
    assert {r.name for r in CONFIG.rewards if CONFIG.judges(r.name, data_set)} == judged


async def test_samples_of_several_sets_are_scored_in_one_hand_over() -> None:
    pool = CONFIG.build()
    try:
        await pool.start()
        samples = [sample("sums", "yes"), sample("names", "yes"), sample("", "yes")]
        outcomes = [await pool.score(each) for each in samples]
        batched = await pool._score_batch(samples)  # whoever comes at once
    finally:
        await pool.aclose()
    assert [list(values) for values in batched] == [[0.0, -0.5], [1.0, -0.5], [-0.5]]
    assert outcomes == [
        Scored(rewards={"exact": 0.0, "length": -0.5}, total=-0.5),
        Scored(rewards={"loose": 1.0, "length": -0.5}, total=0.5),
        Scored(rewards={"length": -0.5}, total=-0.5),
    ]


GROUPS = """
def count(samples):
    return [float(len(samples))] * len(samples)
"""


async def test_a_group_reward_judges_the_groups_of_its_sets(tmp_path) -> None:
    file = tmp_path / "groups.py"
    file.write_text(GROUPS)
    config = RewardPoolConfig(
        rewards=(LengthReward(target=0, limit=4),),
        group_rewards=(GroupReward(name="count", function=f"{file}:count"),),
        sets={"count": ("sums",)},
    )
    pool = config.build()
    try:
        await pool.start()
        for name, rewards in (("sums", {"count", "length"}), ("words", {"length"})):
            siblings = [sample(name, "yes")] * 2
            alone = [await pool.score(each) for each in siblings]
            for outcome in await pool.score_group(siblings, alone):
                assert isinstance(outcome, Scored)
                assert outcome.rewards.keys() == rewards
    finally:
        await pool.aclose()


def test_sets_of_a_reward_that_is_not_there_are_refused() -> None:
    with pytest.raises(
        ValueError, match="sets names the reward 'exakt'; rewards are called: exact"
    ):
        RewardPoolConfig(sets={"exakt": ("sums",)})
