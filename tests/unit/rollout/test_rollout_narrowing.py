"""What a producer says of samples that are trained in part, or were cut off."""

from dataclasses import replace

from producer_world import World, generate

from cosmos_core.messages import Generate, GroupId
from cosmos_rollout import PromptRow


async def test_what_is_trained_of_a_group_can_be_narrowed_before_it_is_stored():
    def first_only(trajectories):
        return [
            t
            if t.sibling == 0
            else replace(t, trainable=t.trainable & False, logprobs=0 * t.logprobs)
            for t in trajectories
        ]

    async with World(narrow=first_only, sources=("train", "validation")) as world:
        world.producer.submit(generate(3))
        validated = GroupId(source="validation", round=4, ordinal=3)
        world.producer.submit(Generate(group=validated, attempt=0, num_samples=2))
        events = await world.events(2)
        counts = {e.group.source: [ref.num_tokens for ref in e.samples] for e in events}
        assert counts == {"train": [4, 0], "validation": [4, 5]}
        stored = {key: t.num_trainable for key, t in world.store.trajectories.items()}
        assert [stored["train.0.3.0.0"], stored["train.0.3.0.1"]] == [4, 0]


async def test_an_answer_at_the_limit_of_tokens_is_reported_as_truncated():
    async with World(rows=[PromptRow(prompt_id="r", prompt="8", answer="abc")], most=8) as world:
        world.producer.submit(generate(0, num_samples=1))
        (event,) = await world.events(1)
        assert [ref.truncated for ref in event.samples] == [True]
