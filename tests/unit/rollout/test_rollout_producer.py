"""The producer over the scripted engine: what it reports, in which order, and what it survives."""

import asyncio

import numpy as np
import pytest
from producer_world import STOP, LengthScorer, Letters, Store, World, generate, spell

from cosmos_core.messages import (
    CancelGroup,
    Generate,
    GroupFailed,
    GroupFinished,
    GroupId,
    LoadFailed,
    LoadVersion,
    VersionLoaded,
    decode_event,
    encode_message,
)
from cosmos_core.trajectory import UNSAMPLED, VersionSpan
from cosmos_rollout import (
    EngineDeadError,
    ExactReward,
    InProcessEngine,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptFile,
    PromptRow,
    PromptSet,
    PythonReward,
    RewardInput,
    RewardPoolConfig,
    Sampling,
    ScriptDecoder,
    sample_seed,
)


async def test_a_group_becomes_trajectories_then_an_event():
    async with World() as world:
        world.producer.submit(generate(3))
        (event,) = await world.events(1)
        assert isinstance(event, GroupFinished)
        assert (event.replica, event.group, event.attempt) == ("rollout-0", generate(3).group, 0)
        first, second = event.samples
        assert (first.sibling, first.num_tokens, first.reward) == (0, 4, 3.0)
        assert first.status == "completed"
        assert (second.sibling, second.num_tokens, second.reward) == (1, 5, 4.0)
        assert (first.oldest_version, first.newest_version) == (4, 4)
        trajectory = world.store.trajectories[first.key]
        assert trajectory.token_ids.tolist() == [ord(c) for c in "3abc"] + [STOP]
        assert first.length == trajectory.num_tokens == 5  # with its prompt
        assert trajectory.trainable.tolist() == [False, True, True, True, True]
        np.testing.assert_allclose(trajectory.logprobs, [0.0, -0.5, -0.5, -0.5, -0.25])
        assert trajectory.versions == (VersionSpan(UNSAMPLED, 1), VersionSpan(4, 4))
        assert (trajectory.prompt_id, trajectory.finish_reason) == ("row3", "stop")
        assert world.scorer.seen[0] == RewardInput(
            prompt="3", response="abc", answer="abc", num_prompt_tokens=1, num_response_tokens=4
        )


async def test_rewards_see_the_whole_conversation_of_a_row_that_is_one():
    said = ({"role": "system", "content": "short"}, {"role": "user", "content": "3"})
    async with World(rows=[PromptRow(prompt_id="a", messages=said)]) as world:
        world.producer.submit(generate(0, num_samples=1))
        await world.events(1)
        (seen,) = world.scorer.seen
        assert seen.messages == (*said, {"role": "assistant", "content": "abc"})
        assert (seen.prompt, seen.response) == ("3", "abc")
        (trajectory,) = world.store.trajectories.values()
        assert "turns" not in trajectory.metrics  # there is one


async def test_a_long_group_holds_nobody_up_and_order_is_that_of_finishing():
    async with World(step_s=0.005) as world:
        for ordinal in (8, 1, 5):
            world.producer.submit(generate(ordinal))
        assert [event.group.ordinal for event in await world.events(3)] == [1, 5, 8]


async def test_siblings_are_scored_while_the_others_generate():
    async with World(step_s=0.02) as world:
        world.producer.submit(generate(0))
        world.producer.submit(generate(8))
        await world.events(1)
        assert len(world.scorer.seen) == 2
        assert world.engine.num_running == 2


async def test_at_most_slots_groups_are_in_work():
    async with World(slots=2, step_s=0.005) as world:
        for ordinal in range(6):
            world.producer.submit(generate(ordinal, num_samples=3))
        await asyncio.sleep(0.01)
        assert world.engine.num_running <= 6
        assert world.producer.num_groups > 2
        events = await world.events(6)
        assert sorted(event.group.ordinal for event in events) == list(range(6))
        assert world.producer.num_groups == 0


async def test_a_command_delivered_twice_generates_once_and_reports_again():
    async with World() as world:
        world.producer.submit(generate(2))
        world.producer.submit(generate(2))
        (first,) = await world.events(1)
        world.producer.submit(generate(2))
        (again,) = await world.events(1)
        assert again == first
        assert len(world.scorer.seen) == 2


async def test_a_failed_reward_is_a_failed_sample_without_payload_or_reward():
    async with World(scorer=LengthScorer(fails_on="abcd")) as world:
        world.producer.submit(generate(3))
        (event,) = await world.events(1)
        good, bad = event.samples
        assert (good.status, good.reward) == ("completed", 3.0)
        assert (bad.status, bad.key, bad.reward) == ("failed", "", 0.0)
        assert bad.failure == "reward length: KeyError: 'x'"
        assert len(world.store.trajectories) == 1


async def test_a_cancelled_group_leaves_the_engine_and_says_nothing():
    async with World(step_s=0.01, slots=1) as world:
        world.producer.submit(generate(8))
        world.producer.submit(generate(7))
        world.producer.submit(generate(1))
        await asyncio.sleep(0.03)
        for ordinal in (8, 7):
            group = generate(ordinal).group
            world.producer.cancel(CancelGroup(group=group, attempt=0))
        (event,) = await world.events(1)
        assert event.group.ordinal == 1
        assert world.engine.num_running == 0


async def test_a_group_that_nobody_cancelled_is_reported_whatever_was_cancelled_in_it():
    class Gives(LengthScorer):
        async def score(self, sample: RewardInput):
            raise asyncio.CancelledError

    async with World(scorer=Gives()) as world:
        world.producer.submit(generate(1))
        (event,) = await world.events(1)
        assert isinstance(event, GroupFailed)
        assert event.reason == "CancelledError: "


async def test_words_of_a_failed_reward_that_are_no_utf_8_are_written_out(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import json\ndef of(sample): raise ValueError(json.loads('\"\\\\ud83d\"'))\n")
    pool = RewardPoolConfig(rewards=(PythonReward(function=f"{file}:of"),)).build()
    async with World(scorer=pool) as world:
        world.producer.submit(generate(3))
        (event,) = await world.events(1)
    await pool.aclose()
    assert event.samples[0].failure == "reward of: ValueError: \\ud83d"
    assert decode_event(encode_message(event)) == event


async def test_what_cannot_be_generated_is_a_failed_group_with_a_reason():
    async with World() as world:
        other = GroupId(source="validation", round=0, ordinal=0)
        world.producer.submit(Generate(group=other, attempt=1, num_samples=1))
        (event,) = await world.events(1)
        assert event == GroupFailed(
            replica="rollout-0",
            group=other,
            attempt=1,
            reason="PromptDataError: there are no prompts for 'validation'",
        )


async def test_a_store_that_is_down_is_a_failed_group():
    async with World() as world:

        async def refuse(trajectories):
            raise ConnectionError("Redis is gone")

        world.store.publish = refuse
        world.producer.submit(generate(0))
        (event,) = await world.events(1)
        assert isinstance(event, GroupFailed)
        assert event.reason == "ConnectionError: Redis is gone"


@pytest.mark.parametrize(
    ("prompt", "drop_as", "reason"),
    [
        ("1" * 64, "prompt too long", "64 tokens, a context of 64 leaves room for 63 at most"),
        ("", "empty prompt", "the prompt has no tokens"),
        ("1\u0100", "prompt not of this vocabulary", "token 256 is outside the vocabulary 0..255"),
    ],
)
async def test_a_prompt_that_no_engine_takes_says_so_for_the_books(prompt, drop_as, reason):
    of_set = {"data_set": "sums"}
    async with World(rows=[PromptRow(prompt_id="0", prompt=prompt, fields=of_set)]) as world:
        world.producer.submit(generate(0))
        (event,) = await world.events(1)
        assert isinstance(event, GroupFailed)
        assert event.drop_as == drop_as
        assert reason in event.reason
        assert event.reason.endswith("; prompt '0' of 'sums' (train)")


async def test_a_row_that_cannot_be_read_is_dropped_by_its_name(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": 7, "answer": "7"}\n')
    async with World(rows=PromptFile(file)) as world:
        world.producer.submit(generate(1))
        (event,) = await world.events(1)
        assert isinstance(event, GroupFailed)
        assert event.drop_as == "prompt that cannot be read"
        assert f"{file}:2: field 'prompt' has to be a text, found 7" in event.reason


async def test_a_dead_engine_fails_every_group_and_then_the_producer():
    async with World(step_s=0.002) as world:
        for ordinal in (9, 8):
            world.producer.submit(generate(ordinal))
        events = await world.events(2)
        assert all(isinstance(event, GroupFailed) for event in events)
        assert "EngineDeadError" in events[0].reason
        assert "the device is full" in events[0].reason
        with pytest.raises(EngineDeadError):
            await world.events(1)


async def test_weights_load_while_groups_are_in_work():
    async with World(step_s=0.005) as world:
        world.producer.submit(generate(8))
        await asyncio.sleep(0.02)
        loaded = await world.producer.load(LoadVersion(version=5, endpoints=("here",)))
        assert isinstance(loaded, VersionLoaded)
        assert (loaded.replica, loaded.version) == ("rollout-0", 5)
        (event,) = await world.events(1)
        assert (event.samples[0].oldest_version, event.samples[0].newest_version) == (4, 5)
        reading = world.producer.occupancy()
        assert reading.seconds["paused_for_weights"] == pytest.approx(loaded.stall_s)
        assert reading.seconds["decoding"] > 0.8 * 8 * 0.005  # from the first token on


async def test_weights_that_do_not_load_are_reported_as_such():
    async with World() as world:
        no_source = InProcessEngine(ScriptDecoder(spell))
        producer = Producer(
            ProducerParts(
                engine=no_source,
                prompts={},
                tokenizer=Letters(),
                scorer=world.scorer,
                publish=world.store.publish,
            ),
            ProducerConfig(),
            replica="r",
        )
        event = await producer.load(LoadVersion(version=5, endpoints=()))
        assert isinstance(event, LoadFailed)
        assert (event.version, event.reason) == (
            5,
            "version 5: this engine was given no weight source",
        )
        await no_source.aclose()


async def test_progress_grows_with_tokens_and_with_scores():
    async with World() as world:
        assert world.producer.progress == 0
        world.producer.submit(generate(3))
        await world.events(1)
        assert world.producer.progress == 4 + 5 + 2


def test_seeds_differ_by_everything_but_the_attempt():
    group, other = generate(3).group, generate(4).group
    seeds = {sample_seed(run, g, i) for run in (0, 1) for g in (group, other) for i in range(8)}
    assert len(seeds) == 32
    assert all(0 <= seed < 2**62 for seed in seeds)


@pytest.mark.parametrize("validation", [None, Sampling(temperature=0.3, max_new_tokens=7)])
async def test_samplings_and_seeds_reach_the_engine(validation):
    row, requests = PromptRow(prompt_id="0", prompt="1"), []

    def spy(request, position, version):
        requests.append(request)
        return STOP, -1.0

    engine = InProcessEngine(ScriptDecoder(spy))
    producer = Producer(
        ProducerParts(
            engine=engine,
            prompts=dict.fromkeys(("train", "validation"), PromptSet([row])),
            tokenizer=Letters(),
            scorer=LengthScorer(),
            publish=Store().publish,
        ),
        ProducerConfig(
            sampling=Sampling(stop_token_ids=(STOP,), temperature=0.7, seed=9),
            validation=validation,
        ),
        replica="r",
    )
    producer.submit(generate(0))
    held_out = GroupId(source="validation", round=0, ordinal=1)
    producer.submit(Generate(group=held_out, attempt=3, num_samples=2))
    stream = producer.events()
    assert [(await anext(stream)).group.ordinal for _ in range(2)] == [0, 1]
    sampled = {r.request_id: r.sampling for r in requests}
    assert sampled["train.0.0.0.0"].seed == sample_seed(9, generate(0).group, 0)
    assert sampled["train.0.0.0.1"].seed == sample_seed(9, generate(0).group, 1)
    assert sampled["train.0.0.0.0"].temperature == 0.7
    first, second = (sampled[f"validation.0.1.3.{index}"] for index in range(2))
    assert first.temperature == second.temperature == (0.3 if validation else 0.0)
    assert first.max_new_tokens == (validation or Sampling()).max_new_tokens
    assert (first.seed, second.seed) == (sample_seed(9, held_out, 0), sample_seed(9, held_out, 1))
    await engine.aclose()


async def test_the_reward_pool_fits():
    pool = RewardPoolConfig(rewards=(ExactReward(),)).build()
    await pool.start()
    try:
        async with World(scorer=pool) as world:
            world.producer.submit(generate(3))
            (event,) = await world.events(1)
            assert [sample.reward for sample in event.samples] == [1.0, 0.0]  # "abc", "abcd"
    finally:
        await pool.aclose()
