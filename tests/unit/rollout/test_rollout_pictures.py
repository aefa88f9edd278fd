"""Pictures and videos from the data row, or from an environment, to the trajectory; which tokens
stand where.

The engine here makes ten tokens of a picture or video, where a prompt has one mark.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
pytest.importorskip("PIL")

from PIL import Image
from spelling import LETTER, SAMPLING, engine_of, make_tokenizer, spelled

from cosmos_core.images import MediaError, read_image
from cosmos_core.messages import Generate, GroupFailed, GroupFinished, GroupId
from cosmos_core.trajectory import TeacherScores
from cosmos_core.videos import (
    VideoSampling,
    is_video,
    read_video,
    video_info,
    video_reference,
)
from cosmos_rollout import (
    ChatRenderer,
    Conversation,
    EpisodeError,
    EpisodeLimits,
    Failure,
    GenerationRequest,
    NoPicturesError,
    PictureError,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    PromptTooLongError,
    Scored,
    Shown,
    TeacherReplicas,
    TeacherSettings,
)
from cosmos_rollout.environments.environment import opening
from cosmos_rollout.episode import single_turn
from cosmos_rollout.teaching import teach

MARK = LETTER["~"]
SEEN = LETTER["#"]
TOKENS_A_PICTURE = 10
TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else '~' }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}


class Seeing:
    """An engine that says "red", reads pictures and videos and makes ten tokens of each."""

    def __init__(self, context_length: int = 256) -> None:
        self._engine = engine_of(
            lambda request, position, version: (spelled("red")[position], -1.0)
        )
        self.context_length = context_length
        self.num_tokens_generated = 0
        self.requests: list[GenerationRequest] = []

    async def generate(self, requests: Sequence[GenerationRequest]):
        self.requests += requests
        expanded = [replace(one, images=(), prompt_token_ids=self.expand(one)) for one in requests]
        tokens = {one.request_id: one.prompt_token_ids for one in expanded}
        async with aclosing(self._engine.generate(expanded)) as samples:
            async for sample in samples:
                yield replace(sample, prompt_token_ids=tokens[sample.request_id])

    async def aclose(self) -> None:
        await self._engine.aclose()

    def expand(self, request: GenerationRequest) -> tuple[int, ...]:
        assert request.prompt_token_ids.count(MARK) == len(request.images)
        try:
            for reference in request.images:
                _ = read_video(reference) if is_video(reference) else read_image(reference)
        except MediaError as error:
            raise PictureError(str(error)) from error
        made = seen(request.prompt_token_ids)
        if len(made) >= self.context_length:
            raise PromptTooLongError(f"{len(made)} tokens")
        return made


def seen(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens as the engine sees them."""
    return tuple(
        one for token in tokens for one in ([SEEN] * TOKENS_A_PICTURE if token == MARK else [token])
    )


@pytest.fixture
def red(tmp_path) -> str:
    Image.new("RGB", (2, 2), "red").save(tmp_path / "red.png")
    return str(tmp_path / "red.png")


def row_of(*images: str) -> PromptRow:
    return PromptRow(prompt_id="r", messages=(ASKED,), images=images)


def asked(*texts: str) -> list[int]:
    return TOKENIZER.encode("".join(texts))


OPENING = "<|im_start|>user\n~?<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\n~<|im_end|>\n<|im_start|>assistant\n"


# ------------------------------------------------------------------------------- single turns
class OneForAll:
    def __init__(self) -> None:
        self.seen = []

    async def score(self, sample):
        self.seen.append(sample)
        return Scored(rewards={"one": 1.0}, total=1.0)

    async def score_group(self, samples, outcomes):
        return outcomes


async def group_of(row, engine, *, environment=None):
    """Play a group of two; return its event, trajectories, what was scored and what failed."""
    stored, scorer = [], OneForAll()

    async def publish(trajectories):
        stored.extend(trajectories)
        return [str(trajectory.sibling) for trajectory in trajectories]

    parts = ProducerParts(
        engine=engine,
        prompts={"train": PromptSet([row])},
        tokenizer=TOKENIZER,
        scorer=scorer,
        publish=publish,
        environment=environment,
    )
    producer = Producer(parts, ProducerConfig(sampling=SAMPLING), replica="rollout-0")
    group = GroupId(source="train", round=0, ordinal=0)
    producer.submit(Generate(group=group, attempt=0, num_samples=2))
    try:
        return await anext(producer.events()), stored, scorer.seen, producer.failures
    finally:
        await producer.aclose()
        await engine.aclose()


async def test_a_trajectory_has_the_pictures_and_the_tokens_that_the_model_saw(red):
    engine = Seeing()
    event, stored, scored, _ = await group_of(row_of(red), engine)
    assert isinstance(event, GroupFinished)
    for request in engine.requests:
        assert (request.prompt_token_ids, request.images) == (tuple(asked(OPENING)), (red,))
    prompt = [*seen(asked(OPENING))]
    assert len(prompt) == len(asked(OPENING)) + TOKENS_A_PICTURE - 1
    for trajectory in stored:
        assert trajectory.token_ids.tolist() == prompt + spelled("red")
        assert trajectory.trainable.tolist() == [False] * len(prompt) + [True] * 4
        assert trajectory.images == (red,)
    assert [sample.num_tokens for sample in event.samples] == [4, 4]
    for sample in scored:
        assert (sample.prompt, sample.response, sample.images) == ("?", "red", (red,))
        assert sample.num_prompt_tokens == len(prompt)


async def test_a_picture_that_cannot_be_read_drops_its_group(tmp_path):
    event, stored, _, _ = await group_of(row_of(str(tmp_path / "gone.png")), Seeing())
    assert isinstance(event, GroupFailed)
    assert event.drop_as == "picture or video that cannot be used"
    assert "gone.png: No such file" in event.reason
    assert not stored


async def test_an_engine_without_sight_refuses_pictures_and_drops_nothing(red):
    event, _, _, _ = await group_of(row_of(red), engine_of(None))
    assert isinstance(event, GroupFailed)
    assert event.drop_as == ""
    assert event.reason.startswith(NoPicturesError.__name__)
    assert "has 1 pictures or videos, and ScriptDecoder takes none" in event.reason


class Onlooker:
    """A teacher that notes what it is shown."""

    num_tries = 0

    def __init__(self):
        self.asked = []

    async def score(self, token_ids, shown=None):
        self.asked.append((token_ids, shown))
        zeros = np.zeros((len(token_ids), 0))
        return TeacherScores(
            logprobs=np.full(len(token_ids), -1.0, np.float32),
            top_logprobs=zeros.astype(np.float32),
            top_token_ids=zeros.astype(np.int32),
        )


async def test_a_teacher_is_shown_what_the_model_saw(red):
    engine = Seeing()
    request = GenerationRequest(
        request_id="a", prompt_token_ids=tuple(asked(OPENING)), sampling=SAMPLING, images=(red,)
    )
    async with aclosing(engine.generate([request])) as samples:
        episode = single_turn(request, await anext(samples), "red")
    await engine.aclose()
    teacher = Onlooker()
    scores = await teach(teacher, episode)
    assert not isinstance(scores, Failure)
    assert scores.logprobs.tolist() == [-float(each) for each in episode.trainable]
    shown = Shown(marked_token_ids=tuple(asked(OPENING) + spelled("red")), images=(red,))
    assert teacher.asked == [(episode.token_ids.tolist(), shown)]
    assert tuple(seen(shown.marked_token_ids)) == tuple(episode.token_ids.tolist())

    blind = TeacherReplicas(lambda: ["http://nobody/v1"], TeacherSettings())
    refused = await teach(blind, episode)
    await blind.aclose()
    assert isinstance(refused, Failure)
    assert (refused.reward, refused.error) == ("teacher", "NoPicturesError")
    assert blind.num_tries == 0


# ------------------------------------------------------------------------------- environments
class Gallery:
    """Shows the row's pictures, then others, one a turn."""

    tools = ()

    def __init__(self, *others: object) -> None:
        self._others = others

    async def play(self, row, chat, seed):
        reply = await chat.reply(opening(row))
        for picture in self._others:
            if not reply.is_last:
                content = [{"type": "image", "image": picture}]
                reply = await chat.reply([{"role": "user", "content": content}])
        return {"shown": 1.0}

    async def aclose(self):
        pass


async def played(environment, engine, row):
    conversation = Conversation(
        engine,
        ChatRenderer(TOKENIZER),
        name="e",
        sampling=SAMPLING,
        limits=EpisodeLimits(),
    )
    try:
        return await conversation.play(environment, row, seed=1)
    finally:
        await engine.aclose()


async def test_later_turns_ask_with_marks_and_record_what_was_seen(red):
    engine, blue = Seeing(), Image.new("RGB", (3, 2), "blue")
    episode = await played(Gallery(blue, red), engine, row_of(red))
    first, second, third = engine.requests
    said = spelled("red")
    assert first.prompt_token_ids == tuple(asked(OPENING))
    assert second.prompt_token_ids == (*first.prompt_token_ids, *said, *asked(BETWEEN))
    assert third.prompt_token_ids == (*second.prompt_token_ids, *said, *asked(BETWEEN))
    assert (first.images, third.images) == ((red,), (*second.images, red))
    assert second.images[0] == red
    assert second.images[1].startswith("data:")
    assert read_image(second.images[1]).tobytes() == blue.tobytes()
    assert episode.images == third.images
    assert episode.token_ids.tolist() == [*seen(third.prompt_token_ids), *said]
    assert episode.marked_token_ids == (*third.prompt_token_ids, *said)
    assert episode.token_ids[episode.trainable].tolist() == said * 3
    assert episode.num_prompt_tokens == len(asked(OPENING)) + TOKENS_A_PICTURE - 1
    assert episode.messages[0] == ASKED  # marks, and the pictures beside them


async def test_a_picture_that_leaves_no_room_ends_an_episode_and_is_not_recorded(red):
    whole = len(seen(asked(OPENING))) + len(spelled("red")) + len(asked(BETWEEN))
    engine = Seeing(context_length=whole + TOKENS_A_PICTURE - 1)  # with a mark it would fit
    episode = await played(Gallery(red), engine, row_of(red))
    assert len(engine.requests) == 2
    assert (episode.num_turns, episode.finish_reason, episode.images) == (1, "length", (red,))
    assert episode.token_ids.tolist() == [*seen(asked(OPENING)), *spelled("red")]
    assert episode.rewards == {"shown": 1.0}


async def test_a_prompt_whose_picture_leaves_no_room_is_too_long(red):
    with pytest.raises(PromptTooLongError):
        await played(Gallery(), Seeing(context_length=20), row_of(red))


@pytest.mark.parametrize(
    ("picture", "words"),
    [("/gone.png", "No such file"), (7, "a picture is a path, a URL or bytes, found int")],
)
async def test_an_environment_that_shows_no_picture_costs_its_own_sample(red, picture, words):
    with pytest.raises(EpisodeError, match=words):
        await played(Gallery(picture), Seeing(), row_of(red))
    event, stored, _, failures = await group_of(row_of(red), Seeing(), environment=Gallery(picture))
    assert isinstance(event, GroupFinished)
    assert [sample.status for sample in event.samples] == ["failed", "failed"]
    assert not stored
    assert sum(failures.values()) == 2


class Cinema:
    """Shows the row's video, then a picture and a video that it draws itself."""

    tools = ()

    async def play(self, row, chat, seed):
        await chat.reply(opening(row))
        frames = [Image.new("RGB", (4, 2), colour) for colour in ("red", "green", "blue", "black")]
        video = {"type": "video", "video": frames, "sample_fps": 8}
        content = [{"type": "image", "image": frames[0]}, video]
        await chat.reply([{"role": "user", "content": content}])
        return {"shown": 1.0}

    async def aclose(self):
        pass


async def test_an_environment_shows_videos_and_the_tape_has_what_was_seen(red, tmp_path):
    asked = ({"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]},)
    clip = video_reference([red, red], tmp_path, VideoSampling(fps=4.0))
    engine = Seeing()
    row = PromptRow(prompt_id="r", messages=asked, images=(clip,))
    episode = await played(Cinema(), engine, row)
    first, second = engine.requests
    assert first.images == (clip,)
    own_picture, own_video = second.images[1:]
    assert (is_video(own_picture), is_video(own_video)) == (False, True)
    assert video_info(own_video).fps == 8.0
    shown = read_video(own_video)[:, 0, 0].tolist()
    assert shown == [[255, 0, 0], [0, 128, 0], [0, 0, 255], [0, 0, 0]]
    assert episode.images == second.images == (clip, own_picture, own_video)
    assert episode.token_ids.tolist() == [*seen(second.prompt_token_ids), *spelled("red")]
    assert episode.token_ids.tolist().count(SEEN) == 3 * TOKENS_A_PICTURE
    assert [part["type"] for part in episode.messages[2]["content"]] == ["image", "video"]


async def test_a_video_that_cannot_be_read_drops_its_group(tmp_path):
    frames = [str(tmp_path / f"{number}.png") for number in range(2)]
    clip = video_reference(frames, tmp_path, VideoSampling())
    event, stored, _, _ = await group_of(row_of(clip), Seeing())
    assert isinstance(event, GroupFailed)
    assert event.drop_as == "picture or video that cannot be used"
    assert "0.png: No such file" in event.reason
    assert not stored


async def test_the_opening_has_every_picture_in_its_place(red):
    turns = (
        {"role": "system", "content": "look"},
        {"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "image"}]},
    )
    row = PromptRow(prompt_id="r", messages=turns, images=(red, "video:{}", "/b.png"))
    system, user = opening(row)
    assert system == turns[0]
    assert [part[part["type"]] for part in user["content"]] == [red, "video:{}", "/b.png"]
    assert opening(PromptRow(prompt_id="r", prompt="a")) == ({"role": "user", "content": "a"},)
