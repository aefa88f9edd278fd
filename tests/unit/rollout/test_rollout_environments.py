"""Episodes of many turns: which tokens are recorded, and what a bad environment costs."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from spelling import (
    END,
    LETTER,
    ROW,
    SAMPLING,
    TOKENIZER,
    engine_of,
    make_tokenizer,
    play,
    says,
    spelled,
)

from cosmos_core.messages import Generate, GroupFailed, GroupId
from cosmos_core.trajectory import UNSAMPLED, VersionSpan
from cosmos_rollout import (
    EpisodeError,
    EpisodeLimits,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptDataError,
    PromptRow,
    PromptSet,
    PromptTooLongError,
    Scored,
)
from cosmos_rollout.metered import MeteredEngine
from cosmos_rollout.playing import EnvironmentPlayer, GroupPlan


def metered(engine):
    return MeteredEngine(engine, lambda: None)


class Echo:
    """Answers "ok" until the model says "done"; what it earns is the number of replies."""

    tools = ()

    async def play(self, row, chat, seed):
        messages = [{"role": "user", "content": row.prompt}]
        count = 0
        while True:
            reply = await chat.reply(messages)
            count += 1
            if reply.is_last or reply.text == "done":
                return {"echo": count}
            messages = [{"role": "user", "content": "ok ab"}]

    async def aclose(self):
        pass


async def test_the_tokens_of_every_turn_are_those_the_model_saw_and_said():
    episode = await play(Echo(), says("ab", "done"))
    opening = "<|im_start|>user\nab?<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nok ab<|im_end|>\n<|im_start|>assistant\n"
    parts = [
        (TOKENIZER.encode(opening), False),
        (spelled("ab"), True),  # "a", "b": the tokenizer would say "ab"
        (TOKENIZER.encode(between), False),
        (spelled("done"), True),
    ]
    assert episode.token_ids.tolist() == [token for tokens, _ in parts for token in tokens]
    assert episode.trainable.tolist() == [is_said for tokens, is_said in parts for _ in tokens]
    assert episode.logprobs[episode.trainable].tolist() == [-0.5] * 3 + [-1.5] * 5
    assert not episode.logprobs[~episode.trainable].any()
    assert episode.versions == (
        VersionSpan(UNSAMPLED, len(parts[0][0])),
        VersionSpan(3, 3),
        VersionSpan(UNSAMPLED, len(parts[2][0])),
        VersionSpan(3, 5),
    )
    assert episode.num_prompt_tokens == len(parts[0][0])
    assert (episode.num_turns, episode.finish_reason, episode.response) == (2, "stop", "done")
    assert episode.rewards == {"echo": 2.0}


async def test_the_text_of_the_tokens_is_that_of_the_chat_template():
    episode = await play(Echo(), says("ab", "no", "done"))
    whole = TOKENIZER.apply_chat_template(
        [dict(message) for message in episode.messages], tokenize=False
    )
    text = TOKENIZER.decode(episode.token_ids.tolist(), skip_special_tokens=False)
    assert text == whole.removesuffix("\n")
    assert TOKENIZER.encode(text) != episode.token_ids.tolist()  # hence never anew


async def test_a_limit_of_turns_ends_an_episode_with_what_it_earned():
    episode = await play(Echo(), says("a", "b", "c"), limits=EpisodeLimits(max_turns=2))
    assert (episode.num_turns, episode.rewards, episode.response) == (2, {"echo": 2.0}, "b")


async def test_an_observation_that_leaves_no_room_ends_an_episode_and_is_not_recorded():
    whole = await play(Echo(), says("ab", "done"))
    first = int(np.flatnonzero(whole.trainable)[2]) + 1  # prompt and first reply
    episode = await play(Echo(), says("ab", "done"), context_length=first + 5)
    assert episode.token_ids.tolist() == whole.token_ids[:first].tolist()
    assert (episode.finish_reason, episode.num_turns, episode.response) == ("length", 1, "ab")
    assert episode.rewards == {"echo": 2.0}


async def test_a_reply_that_was_cut_is_the_last():
    def endless(request, position, version):
        return LETTER["a"], -1.0

    episode = await play(Echo(), endless, context_length=100)
    assert (len(episode.token_ids), episode.finish_reason, episode.num_turns) == (100, "length", 1)


class Informs(Echo):
    """Shows tools, before or after the model spoke, and notes numbers."""

    def __init__(self, *, late: bool = False):
        self._late = late

    async def play(self, row, chat, seed):
        shown = [{"type": "function", "function": {"name": "add"}}]
        if not self._late:
            chat.show(shown)
        reply = await chat.reply([{"role": "user", "content": row.prompt}])
        if self._late:
            chat.show(shown)
        chat.note({"letters": len(reply.text), "odd": float("nan"), "turns": 9})
        return {}


async def test_tools_that_an_environment_shows_late_are_in_the_opening():
    episode = await play(Informs(), says("ab"))
    text = TOKENIZER.decode(episode.token_ids.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\n[")
    assert '"name": "add"' in text
    assert episode.metrics == {"letters": 2.0, "turns": 9.0}


async def test_tools_that_are_shown_after_the_model_spoke_cost_the_episode():
    with pytest.raises(EpisodeError, match="other tools were to be shown after something was said"):
        await play(Informs(late=True), says("ab"))


# ------------------------------------------------------------------------------- the producer
class OneForAll:
    async def score(self, sample):
        self.seen = sample
        return Scored(rewards={"one": 1.0}, total=1.0)

    async def score_group(self, samples, outcomes):
        return outcomes


class Moody(Echo):
    """Fails the episodes whose first reply is a word it does not like."""

    async def play(self, row, chat, seed):
        reply = await chat.reply([{"role": "user", "content": row.prompt}])
        match reply.text:
            case "raise":
                raise KeyError("lost")
            case "hang":
                await asyncio.sleep(1000)
            case "nan":
                return {"mood": float("nan")}
        return {"mood": 0.5}


def moods(request, position, version):
    words = ("fine", "raise", "hang", "nan")
    return spelled(words[int(request.request_id.split(".")[-1])])[position], -1.0


async def finished(script, environment, num_samples: int):
    stored = []

    async def publish(trajectories):
        stored.extend(trajectories)
        return [str(t.sibling) for t in trajectories]

    engine = engine_of(script)
    scorer = OneForAll()
    parts = ProducerParts(
        engine=engine,
        prompts={"train": PromptSet([ROW])},
        tokenizer=TOKENIZER,
        scorer=scorer,
        publish=publish,
        environment=environment,
    )
    config = ProducerConfig(sampling=SAMPLING, episode=EpisodeLimits(timeout_s=1.0))
    producer = Producer(parts, config, replica="r0")
    group = GroupId(source="train", round=0, ordinal=0)
    producer.submit(Generate(group=group, attempt=0, num_samples=num_samples))
    try:
        async with asyncio.timeout(60):
            event = await anext(producer.events())
        return event, stored, producer.failures, scorer
    finally:
        await producer.aclose()
        await engine.aclose()


async def test_an_episode_that_fails_costs_itself_and_is_counted():
    event, stored, failures, _ = await finished(moods, Moody(), 4)
    assert [sample.status for sample in event.samples] == ["completed"] + ["failed"] * 3
    assert [sample.failure for sample in event.samples[1:]] == [
        "reward environment: KeyError: KeyError: 'lost'",
        "reward environment: TimeoutError: no move within 1.0 s",
        "reward environment: EpisodeError: the environment's rewards are not finite: mood nan",
    ]
    assert failures == {
        "environment: KeyError": 1,
        "environment: TimeoutError": 1,
        "environment: EpisodeError": 1,
    }
    (trajectory,) = stored
    assert (trajectory.rewards, trajectory.reward) == ({"mood": 0.5, "one": 1.0}, 1.5)


async def test_an_episode_becomes_a_trajectory_with_every_turn_and_reward():
    event, stored, failures, scorer = await finished(says("ab", "done"), Echo(), 1)
    (trajectory,) = stored
    assert (event.samples[0].num_tokens, trajectory.num_trainable) == (8, 8)
    assert trajectory.metrics["turns"] == 2.0
    assert trajectory.metrics["weight_versions"] == 1.0
    assert trajectory.rewards == {"echo": 2.0, "one": 1.0}
    assert failures == {}
    assert (scorer.seen.response, scorer.seen.num_response_tokens) == ("done", 8)
    assert [message["role"] for message in scorer.seen.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]


async def test_numbers_that_an_environment_notes_are_kept_beside_those_of_every_sample():
    _, (trajectory,), _, _ = await finished(says("ab"), Informs(), 1)
    assert (trajectory.metrics["letters"], trajectory.metrics["turns"]) == (2.0, 1.0)


async def test_an_engine_that_dies_is_no_episode_that_failed():
    def dies(request, position, version):
        raise MemoryError("the device is full")

    class Swallows(Echo):
        async def play(self, row, chat, seed):
            try:
                return await super().play(row, chat, seed)
            except Exception:  # noqa: BLE001 - that is what this environment is for
                return {"echo": 1.0}

    event, stored, _, _ = await finished(dies, Swallows(), 2)
    assert isinstance(event, GroupFailed)
    assert "the device is full" in event.reason
    assert stored == []


def test_a_tokenizer_without_a_chat_template_is_known_at_the_start():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(PromptDataError, match="needs a tokenizer whose chat template"):
        EnvironmentPlayer(metered(engine_of(says("a"))), tokenizer, Echo(), EpisodeLimits())


class Odd(Echo):
    """Does what its row says, once the model has spoken."""

    async def play(self, row, chat, seed):
        opening = [{"role": "user", "content": row.prompt}]
        if self.how == "two at once":
            await asyncio.gather(chat.reply(opening), chat.reply(opening))
        else:
            await chat.reply(opening)
        match self.how:
            case "exit":
                raise SystemExit(2)
            case "cancel":  # its own task, and waits for it
                task = asyncio.create_task(asyncio.sleep(1000))
                task.cancel()
                await task
            case "nothing":
                return None
            case "words":
                return {"mood": "good"}
        return {}

    def __init__(self, how: str) -> None:
        self.how = how


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "SystemExit: 2"),
        ("cancel", "CancelledError"),
        ("nothing", "have to be numbers by name, found None"),
        ("words", "have to be numbers by name, found {'mood': 'good'}"),
        ("two at once", "before the one before it had come"),
    ],
)
async def test_what_an_environment_should_not_do_costs_its_sample_and_no_other(how, words):
    with pytest.raises(EpisodeError, match=words):
        await play(Odd(how), says("ab", "ab"))


async def test_an_environment_that_asks_on_after_an_error_is_not_waited_for():
    class AsksOn(Echo):
        async def play(self, row, chat, seed):
            with suppress(PromptTooLongError):
                await chat.reply([{"role": "user", "content": "?"}])
            await asyncio.sleep(1000)

    with pytest.raises(PromptTooLongError):
        await play(AsksOn(), says("a"), context_length=5, limits=EpisodeLimits(timeout_s=0.2))


async def test_an_environment_without_tools_shows_those_of_the_row():
    turns = ({"role": "user", "content": "ab?"},)
    row = PromptRow(prompt_id="r", messages=turns, tools=({"name": "look"},))
    plan = GroupPlan(row=row, name="g", seed=1, samplings=(SAMPLING,))
    engine = engine_of(says("done"))
    player = EnvironmentPlayer(metered(engine), TOKENIZER, Echo(), EpisodeLimits())
    ((_, episode),) = [played async for played in player.play(plan)]
    await engine.aclose()
    assert '[{"name": "look"}]' in TOKENIZER.decode(episode.token_ids.tolist())


async def test_an_episode_is_counted_from_its_first_turn_until_its_environment_is_done():
    counts: list[tuple[int, int]] = []
    engine = engine_of(says("a", "b"))
    meter = MeteredEngine(engine, lambda: counts.append((meter.num_requests, meter.num_episodes)))
    player = EnvironmentPlayer(meter, TOKENIZER, Echo(), EpisodeLimits(max_turns=2))
    plan = GroupPlan(row=ROW, name="g", seed=1, samplings=(SAMPLING,))
    assert [index async for index, _ in player.play(plan)] == [0]
    await engine.aclose()
    assert counts == [(0, 1), (1, 1), (0, 1), (1, 1), (0, 1), (0, 0)]


async def test_siblings_play_their_turns_beside_one_another():
    """Every turn of a sibling is asked for while all others have one of theirs in flight."""
    at_once: dict[int, int] = {}

    def script(request, position, version):
        turn = sum(token == END for token in request.prompt_token_ids) // 2
        at_once[turn] = max(at_once.get(turn, 0), engine.num_running)
        return spelled("a" * 20)[position], -1.0

    engine = engine_of(script)
    player = EnvironmentPlayer(metered(engine), TOKENIZER, Echo(), EpisodeLimits(max_turns=3))
    plan = GroupPlan(row=ROW, name="g", seed=1, samplings=(SAMPLING,) * 4)
    async with asyncio.timeout(60):
        played = [each async for each in player.play(plan)]
    await engine.aclose()
    assert sorted((index, episode.num_turns) for index, episode in played) == [
        (index, 3) for index in range(4)
    ]
    assert at_once == {0: 4, 1: 4, 2: 4}
