"""Teachers: what they are asked, who is asked, what they are forgiven and what not."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from cosmos_core.messages import Generate, GroupFinished, GroupId
from cosmos_core.trajectory import TeacherScores, Trajectory
from cosmos_rollout import (
    GenerationRequest,
    InProcessEngine,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    RewardInput,
    Sampling,
    Scored,
    ScriptDecoder,
    Shown,
    TeacherError,
    TeacherReplicas,
    TeacherSettings,
    answer_scores,
)

TOKENS = (5, 9, 33, 12)


def scores_of(tokens, top_k: int) -> TeacherScores:
    """Log-prob -token/8 of each token; candidates are tokens 0, 1, ... at -0.5, -1, ..."""
    logprobs = np.array([0.0, *(-token / 8 for token in tokens[1:])], np.float32)
    places = np.arange(len(tokens)) > 0
    return TeacherScores(
        logprobs=logprobs,
        top_logprobs=np.where(places[:, None], -0.5 * np.arange(1, top_k + 1), 0).astype(
            np.float32
        ),
        top_token_ids=np.where(places[:, None], np.arange(top_k), 0).astype(np.int32),
    )


class Desk(BaseHTTPRequestHandler):
    """Answers as a server of completions does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, Replica)
        server.asked.append(asked)
        if server.nonsense:
            self.send_response(200)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"<html>")
        elif server.failures:
            self.reply(server.failures.pop(0), {"error": "words of the server"})
        elif self.headers.get("Authorization") != "Bearer secret":
            self.reply(401, {"error": "who are you?"})
        else:
            scores = scores_of(asked["prompt"], min(asked["prompt_logprobs"], server.most))
            told = answer_scores(asked["prompt"], scores)
            self.reply(200, {"choices": [{"prompt_logprobs": told}]})

    def reply(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Replica(ThreadingHTTPServer):
    """A teacher on a port of the system's choice."""

    daemon_threads = True

    def __init__(self, *, failures: tuple[int, ...] = (), most: int = 100) -> None:
        super().__init__(("127.0.0.1", 0), Desk)
        self.failures, self.most = list(failures), most
        self.asked: list[dict] = []
        self.nonsense = False
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.end()


def settings(**changes) -> TeacherSettings:
    return TeacherSettings(**{"token": "secret", "deadline_s": 30.0, **changes})


async def test_own_teachers_are_told_of_pictures(replica: Replica):
    teacher = TeacherReplicas(lambda: [replica.url], settings(show_pictures=True))
    await teacher.score(TOKENS, Shown(marked_token_ids=(5, 7), images=("red.png",)))
    await teacher.aclose()
    (asked,) = replica.asked
    assert asked["prompt"] == [5, 9, 33, 12]
    assert (asked["marked_prompt"], asked["images"]) == ([5, 7], ["red.png"])


@pytest.mark.parametrize("top_k", [0, 3])
async def test_scores_arrive_as_the_teacher_gave_them(replica: Replica, top_k: int):
    teacher = TeacherReplicas(lambda: [replica.url], settings(top_k=top_k))
    found, expected = await teacher.score(TOKENS), scores_of(TOKENS, top_k)
    assert found.logprobs.tolist() == [0.0, -9 / 8, -33 / 8, -12 / 8]
    np.testing.assert_array_equal(found.top_logprobs, expected.top_logprobs)
    np.testing.assert_array_equal(found.top_token_ids, expected.top_token_ids)
    assert found.top_logprobs.shape == (4, top_k)
    assert replica.asked == [
        {
            "model": "teacher",
            "prompt": [5, 9, 33, 12],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top_k,
        }
    ]
    await teacher.aclose()


async def test_a_token_among_the_likeliest_is_told_once():
    scores = scores_of((7, 1), 2)
    told = answer_scores((7, 1), scores)
    assert told == [None, {"0": {"logprob": -0.5, "rank": 1}, "1": {"logprob": -1.0, "rank": 2}}]


async def test_a_teacher_that_came_back_elsewhere_is_found(replica: Replica):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    there = [[], [gone], [gone], [replica.url]]  # none yet; one that died; a new one

    teacher = TeacherReplicas(lambda: there.pop(0) if len(there) > 1 else there[0], settings())
    assert (await teacher.score(TOKENS)).logprobs[1] == -9 / 8
    assert teacher.num_tries == 4
    await teacher.aclose()


async def test_one_that_is_not_there_keeps_nobody_from_the_others(replica: Replica):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    teacher = TeacherReplicas(lambda: [gone, replica.url], settings())
    await teacher.ready(30.0)
    assert teacher.last_failure.startswith(f"{gone}: ConnectError")
    for _ in range(3):
        await teacher.score(TOKENS)
    assert teacher.num_tries == 1 + 4, "who failed a moment ago is asked last"
    await teacher.aclose()


async def test_one_that_hangs_leaves_time_for_the_others(replica: Replica):
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # connections come, and nobody answers
        url = f"http://127.0.0.1:{hangs.getsockname()[1]}/v1"
        teacher = TeacherReplicas(lambda: [url, replica.url], settings(deadline_s=8.0))
        await asyncio.gather(*(teacher.score(TOKENS) for _ in range(4)))
        assert teacher.last_failure == f"{url}: TimeoutError()"
        assert len(replica.asked) == 4
        await teacher.aclose()


async def test_work_goes_to_the_least_busy():
    one, other = Replica(), Replica()
    try:
        teacher = TeacherReplicas(lambda: [one.url, other.url], settings())
        await asyncio.gather(*(teacher.score((1, token)) for token in range(8)))
        assert sorted((len(one.asked), len(other.asked))) != [0, 8]
        assert len(one.asked) + len(other.asked) == 8
        await teacher.aclose()
    finally:
        one.end()
        other.end()


async def test_a_server_that_is_too_busy_is_asked_again():
    replica = Replica(failures=(503, 429))
    try:
        teacher = TeacherReplicas(lambda: [replica.url], settings())
        assert (await teacher.score(TOKENS)).logprobs[1] == -9 / 8
        assert len(replica.asked) == 3
        await teacher.aclose()
    finally:
        replica.end()


async def test_what_everybody_would_refuse_is_refused_at_once(replica: Replica):
    teacher = TeacherReplicas(lambda: [replica.url], settings(token="wrong"))
    with pytest.raises(TeacherError, match=r"answered 401: .*who are you"):
        await teacher.score(TOKENS)
    assert len(replica.asked) == 1
    await teacher.aclose()


async def test_too_few_candidates_are_an_error():
    replica = Replica(most=2)
    try:
        teacher = TeacherReplicas(lambda: [replica.url], settings(top_k=5))
        with pytest.raises(TeacherError, match="gives 3 likeliest tokens of 5 asked for"):
            await teacher.score(TOKENS)
        await teacher.aclose()
    finally:
        replica.end()


async def test_the_deadline_names_who_was_waited_for():
    teacher = TeacherReplicas(list, settings(deadline_s=0.3))
    with pytest.raises(TeacherError, match=r"no teacher scored 4 tokens within 0\.3 s.*there is"):
        await teacher.score(TOKENS)
    with pytest.raises(TeacherError, match=r"no teacher answered within 0\.2 s"):
        await teacher.ready(0.2)
    await teacher.aclose()


async def test_another_model_is_known_at_the_start(replica: Replica):
    teacher = TeacherReplicas(lambda: [replica.url], settings(model="large"))
    with pytest.raises(TeacherError, match=r"serves \['teacher'\], not 'large'"):
        await teacher.ready(30.0)
    await teacher.aclose()


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids)


def spell(request: GenerationRequest, position: int, version: int) -> tuple[int, float]:
    """Answer "abc"; the second sibling "abcd"."""
    length = 3 + int(request.request_id[-1] == "1")
    return (ord("a") + position, -0.5) if position < length else (10, -0.25)


class HalfTeacher:
    """Scores tokens by their numbers, none of which may be 100 ("d"); counts what it was asked."""

    num_tries = 0

    async def score(self, token_ids: Sequence[int], shown: Shown | None = None) -> TeacherScores:
        assert shown is None
        self.num_tries += 1
        if 100 in token_ids:
            raise TeacherError("no teacher scored 6 tokens within 1 s; at last: there is none")
        none = np.zeros((len(token_ids), 0), np.float32)
        scored = -np.array(token_ids, np.float32) / 100
        return TeacherScores(
            logprobs=scored, top_logprobs=none, top_token_ids=none.astype(np.int32)
        )


class Ones:
    """A reward of 1 for anything."""

    async def score(self, sample: RewardInput) -> Scored:
        return Scored(rewards={"one": 1.0}, total=1.0)

    async def score_group(self, samples, outcomes):
        return outcomes


async def test_a_teachers_scores_go_with_the_tokens_that_were_sampled():
    stored: dict[str, Trajectory] = {}

    async def publish(trajectories: Sequence[Trajectory]) -> list[str]:
        stored.update((f"{t.group}.{t.sibling}", t) for t in trajectories)
        return [f"{t.group}.{t.sibling}" for t in trajectories]

    rows = PromptSet([PromptRow(prompt_id="row", prompt="3", answer="abc")], order="file")
    engine = InProcessEngine(ScriptDecoder(spell, context_length=64))
    teacher = HalfTeacher()
    producer = Producer(
        ProducerParts(
            engine=engine,
            prompts={"train": rows, "validation": rows},
            tokenizer=Letters(),
            scorer=Ones(),
            publish=publish,
            teacher=teacher,
        ),
        ProducerConfig(sampling=Sampling(max_new_tokens=20, stop_token_ids=(10,))),
        replica="rollout-0",
    )
    events = producer.events()
    train = GroupId(source="train", round=0, ordinal=0)
    producer.submit(Generate(group=train, attempt=0, num_samples=2))
    event = await asyncio.wait_for(anext(events), 30)
    assert isinstance(event, GroupFinished)
    first, second = event.samples
    scores = stored[first.key].teacher
    assert scores is not None
    np.testing.assert_allclose(scores.logprobs, [0.0, -0.97, -0.98, -0.99, -0.1], rtol=1e-6)
    assert (second.status, second.key) == ("failed", "")
    assert "no teacher scored 6 tokens" in second.failure
    assert producer.failures == {"teacher: TeacherError": 1}
    num_tokens, num_tries, num_scored = 9, 2, 2
    assert producer.progress == num_tokens + num_tries + num_scored
    validation = GroupId(source="validation", round=1, ordinal=0)
    producer.submit(Generate(group=validation, attempt=0, num_samples=1))
    event = await asyncio.wait_for(anext(events), 30)
    assert isinstance(event, GroupFinished)
    assert stored[event.samples[0].key].teacher is None
    assert teacher.num_tries == num_tries  # nobody teaches what is not trained on
    await producer.aclose()
    await engine.aclose()


async def test_something_else_at_the_address_of_a_teacher_costs_the_sample_alone(replica: Replica):
    replica.nonsense = True
    teacher = TeacherReplicas(lambda: [replica.url], settings(deadline_s=0.3))
    with pytest.raises(TeacherError, match=r"no teacher scored .* at last: http.*JSON"):
        await teacher.score(TOKENS)
    await teacher.aclose()
