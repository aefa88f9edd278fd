"""Groups whose rewards take long: others are generated in their place, up to a limit."""

import asyncio

import pytest

from cosmos_core.messages import Generate, GroupId
from cosmos_rollout import (
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    RewardInput,
    Sampling,
    Scored,
    ScriptedConfig,
)
from cosmos_rollout.engines import EngineSetup


class Bytes:
    """A tokenizer of single characters."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids)

    def apply_chat_template(self, conversation, *, add_generation_prompt: bool, tokenize: bool):
        return conversation[-1]["content"]


class Examiner:
    """Keeps every sample until it is told to go on."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.prompts: list[str] = []

    async def score(self, sample: RewardInput):
        self.prompts.append(sample.prompt)
        await self.go.wait()
        return Scored(rewards={"late": 1.0}, total=1.0)

    async def score_group(self, samples, outcomes):
        return outcomes


async def keys_of(trajectories):
    return [str(trajectory.sibling) for trajectory in trajectories]


@pytest.mark.parametrize(("scoring", "generated"), [(0, ["1"]), (2, ["1", "2", "3"])])
async def test_groups_are_generated_while_rewards_of_others_are_computed(
    tmp_path, scoring, generated
):
    examiner = Examiner()
    engine = await ScriptedConfig().build(EngineSetup(model_path=tmp_path))
    rows = [PromptRow(prompt_id=str(i), prompt=str(i)) for i in range(10)]
    parts = ProducerParts(
        engine=engine,
        prompts={"train": PromptSet(rows, order="file")},
        tokenizer=Bytes(),
        scorer=examiner,
        publish=keys_of,
    )
    config = ProducerConfig(slots=1, scoring=scoring, sampling=Sampling(max_new_tokens=3))
    producer = Producer(parts, config, replica="r0")
    try:
        for ordinal in (1, 2, 3, 4):
            group = GroupId(source="train", round=0, ordinal=ordinal)
            producer.submit(Generate(group=group, attempt=0, num_samples=1))
        async with asyncio.timeout(60):
            while examiner.prompts != generated:  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert examiner.prompts == generated  # no more than slots and scoring hold
            assert producer.num_groups == 4
            assert producer.occupancy().slot_share <= 1.0
            examiner.go.set()
            events = producer.events()
            found = [(await anext(events)).group.ordinal for _ in range(4)]
        assert found == [1, 2, 3, 4]
    finally:
        await producer.aclose()
        await engine.aclose()


@pytest.mark.parametrize(("slots", "scoring"), [(0, 0), (1, -1)])
def test_wrong_numbers_are_refused(slots, scoring):
    with pytest.raises(ValueError, match="slots has to be 1 or more and scoring 0 or more"):
        ProducerConfig(slots=slots, scoring=scoring)
