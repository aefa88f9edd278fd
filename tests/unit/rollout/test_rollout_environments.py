"""Episodes of many turns: which tokens are recorded, and what a bad environment costs."""

import asyncio
import json

import numpy as np
import pytest

pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")

from transformers import PreTrainedTokenizerFast  # noqa: E402

from cosmos_core.messages import Generate, GroupFailed, GroupId  # noqa: E402
from cosmos_core.trajectory import UNSAMPLED, VersionSpan  # noqa: E402
from cosmos_rollout import (  # noqa: E402
    ChatRenderer,
    Conversation,
    EpisodeLimits,
    InProcessEngine,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    PythonEnvironmentConfig,
    Sampling,
    Scored,
    ScriptDecoder,
    ToolEnvironmentConfig,
    UserCodeError,
    VersionSource,
)

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
LETTER = {letter: 2 + index for index, letter in enumerate(ALPHABET)}
END = 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and one merge: "ab" is a token of its own, which "a" and "b" sampled alone are not."""
    vocabulary = {"<|im_start|>": 0, "<|im_end|>": END, **LETTER, "ab": 2 + len(LETTER)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b")])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


TOKENIZER = make_tokenizer()
SIZE = len(TOKENIZER)


def spelled(text: str) -> list[int]:
    """One token a byte, as no tokenizer would have it, and the end."""
    return [*(LETTER[letter] for letter in text.replace(" ", "Ġ").replace("\n", "Ċ")), END]


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def says(*replies: str):
    """A script that spells the replies, one a turn; the turn is counted by ends of replies."""

    def script(request, position, version):
        turn = sum(
            1
            for i, token in enumerate(request.prompt_token_ids)
            if token == END and assistant_turn(request.prompt_token_ids[:i])
        )
        return spelled(replies[turn])[position], -0.5 - turn

    return script


def assistant_turn(tokens) -> bool:
    """Whether the turn that is open at the end of these tokens is the assistant's."""
    text = TOKENIZER.decode(list(tokens), skip_special_tokens=False)
    return text.rpartition("<|im_start|>")[2].startswith("assistant")


def engine_of(script, context_length: int = 2048) -> InProcessEngine:
    decoder = ScriptDecoder(script, context_length=context_length, vocabulary_size=SIZE)
    return InProcessEngine(decoder, version=3, source=VersionSource())


SAMPLING = Sampling(max_new_tokens=200, stop_token_ids=(END,), seed=5)
ROW = PromptRow(prompt_id="r", prompt="ab?", answer="4")


async def play(environment, script, *, context_length: int = 2048, limits=None):
    engine = engine_of(script, context_length)
    renderer = ChatRenderer(TOKENIZER, environment.tools)
    conversation = Conversation(
        engine, renderer, name="e", sampling=SAMPLING, limits=limits or EpisodeLimits()
    )
    try:
        async with asyncio.timeout(60):
            return await conversation.play(environment, ROW, seed=1)
    finally:
        await engine.aclose()
        await environment.aclose()


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


# ------------------------------------------------------------------------------- tools
TOOLS = '''
import asyncio, os, time

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "waited"

def bad(how: str) -> str:
    """Fail.

    Args:
        how: in which way
    """
    if how == "raise":
        raise KeyError("lost")
    if how == "die":
        os._exit(3)
    if how == "long":
        return "x" * 1000
    while True:
        time.sleep(1)

def vague(a):
    return a
'''


@pytest.fixture(scope="module")
def tool_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    return path


async def observations(tool_file, *replies: str, timeout_s: float = 30.0) -> list[str]:
    functions = tuple(f"{tool_file}:{name}" for name in ("add", "wait", "bad"))
    config = ToolEnvironmentConfig(functions=functions, timeout_s=timeout_s, result_chars=100)
    episode = await play(config.build(), says(*replies))
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


async def test_tools_answer_in_the_order_of_the_calls(tool_file):
    both = call("add", a=2, b=2) + " and " + call("wait", seconds=0.01)
    assert await observations(tool_file, both, call("add", a=-1, b=1), "4") == ["4", "waited", "0"]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (call("bad", how="raise"), "error: KeyError: 'lost'"),
        (call("bad", how="die"), "error: bad ended its process (exit code 3)"),
        (call("bad", how="long"), "x" * 100 + " ... (cut)"),
        (call("subtract", a=1), "error: there is no tool 'subtract'; there are add, wait, bad"),
        ('<tool_call>{"name": 3}</tool_call>', "error: the call has no text 'name'"),
        (
            '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
            "error: 'arguments' of the call have to be an object",
        ),
    ],
)
async def test_what_goes_wrong_with_a_tool_is_an_observation(tool_file, asked, answer):
    assert await observations(tool_file, asked, "ok") == [answer]


async def test_a_call_that_is_not_json_or_lacks_an_argument_is_told_so(tool_file):
    broken, lacking = await observations(
        tool_file, "<tool_call>{</tool_call>" + call("add", a=1), "ok"
    )
    assert broken.startswith("error: the call is not JSON: ")
    assert lacking.startswith("error: TypeError: ")
    assert "'b'" in lacking


@pytest.mark.parametrize("name", ["bad", "wait"])
async def test_a_tool_that_takes_too_long_is_ended_and_the_episode_goes_on(tool_file, name):
    asked = call("bad", how="hang") if name == "bad" else call("wait", seconds=1000)
    found = await observations(tool_file, asked, "ok", timeout_s=2.0)
    assert found == [f"error: {name} took longer than 2.0 s"]


async def test_the_model_is_shown_what_tools_there_are(tool_file):
    environment = ToolEnvironmentConfig(functions=(f"{tool_file}:add",)).build()
    episode = await play(environment, says("4"))
    shown = TOKENIZER.decode(episode.token_ids.tolist()[: episode.num_prompt_tokens])
    assert '"name": "add"' in shown
    assert '"description": "the second"' in shown


def test_a_tool_that_does_not_say_what_it_takes_is_refused(tool_file):
    with pytest.raises(UserCodeError, match="tool vague: "):
        ToolEnvironmentConfig(functions=(f"{tool_file}:vague",)).build()


def test_wrong_settings_are_refused_where_they_are_made(tool_file):
    with pytest.raises(ValueError, match="distinct names"):
        ToolEnvironmentConfig(functions=("a:f", "b:f"))
    with pytest.raises(ValueError, match="max_turns"):
        EpisodeLimits(max_turns=0)


def test_an_environment_that_is_none_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def make():\n    return object()\n")
    with pytest.raises(UserCodeError, match=r"object has no tools, play, aclose"):
        PythonEnvironmentConfig(function=f"{tmp_path}/mine.py:make").build()


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
