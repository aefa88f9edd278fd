"""A server at the other end of an endpoint that is not what it should be."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cosmos_rollout import (
    EngineError,
    EngineSettingsError,
    EngineStartError,
    GenerationRequest,
    PromptRefusedError,
    Sampling,
    TransformersConfig,
)
from cosmos_rollout.engines.endpoint import EndpointConfig
from cosmos_rollout.engines.setup import EngineSetup

MODELS = {"data": [{"id": "m", "max_model_len": 64}]}


class Desk(BaseHTTPRequestHandler):
    """Says what it was told to say."""

    def do_GET(self) -> None:
        self.say(json.dumps(self.server.models).encode())

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.times.append(time.monotonic())
        trouble = self.server.troubles.pop(0) if self.server.troubles else None
        if trouble == "reset":
            linger = struct.pack("ii", 1, 0)  # closed with a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()
        elif trouble == "cut":
            self.say(TOKEN, announced=10_000)
            self.close_connection = True
        elif trouble is not None:
            self.say(b"later", *trouble)
        else:
            self.say(self.server.answer)

    def say(
        self, body: bytes, status: int = 200, after: str = "", announced: int | None = None
    ) -> None:
        self.send_response(status)
        if after:
            self.send_header("Retry-After", after)
        self.send_header("Content-Length", str(announced or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """On a port of the system's choice."""

    daemon_threads = True
    models: object = MODELS
    answer = b""
    asked: object = None

    def __init__(self, *settings) -> None:
        super().__init__(*settings)
        self.times: list[float] = []
        self.troubles: list[tuple[int, str] | str] = []

    def handle_error(self, request, client_address) -> None:
        """Say nothing of connections that were reset on purpose."""


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[Server]:
    made = Server(("127.0.0.1", port), Desk)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        stop(made)
        thread.join(30)


def stop(server: Server) -> None:
    server.shutdown()
    server.server_close()  # nobody listens any more


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


async def engine_of(server: Server, **settings):
    url = f"http://127.0.0.1:{server.server_port}/v1"
    config = EndpointConfig(url=url, model="m", **settings)
    return await config.build(EngineSetup())


def event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def sampled(server: Server, **settings):
    engine = await engine_of(server, **settings)
    try:
        return await samples_of(engine)
    finally:
        await engine.aclose()


async def samples_of(engine):
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1, 2), sampling=Sampling(max_new_tokens=4)
    )
    return [sample async for sample in engine.generate([request])]


TOKEN = event(token_ids=[7], logprobs={"token_logprobs": [-0.5]}, finish_reason=None)
LAST = event(token_ids=[8], logprobs={"token_logprobs": [-1.0]}, finish_reason="stop")


async def test_events_without_a_choice_are_passed_over(server):
    server.answer = TOKEN + b'data: {"usage": {"total_tokens": 3}}\n\n' + LAST
    (sample,) = await sampled(server)
    assert (sample.token_ids.tolist(), sample.logprobs.tolist()) == ([7, 8], [-0.5, -1.0])


async def test_a_request_undoes_what_a_server_would_do_of_its_own(server):
    server.answer = TOKEN + LAST
    await sampled(server)
    habits = ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [server.asked[name] for name in habits] == [0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "answer",
    [
        b"data: [1]\n\n",
        event(token_ids=7, finish_reason="stop"),
        b'data: {"choices": [3]}\n\n',
    ],
)
async def test_answers_that_make_no_sense_are_errors_of_the_engine(server, answer):
    server.answer = answer
    with pytest.raises(EngineError, match="request r failed at http"):
        await sampled(server)


async def test_scores_that_are_no_json_are_errors_of_the_engine(server):
    server.answer = b"<html>"
    engine = await engine_of(server)
    with pytest.raises(EngineError, match="answers no JSON"):
        await engine.score([1, 2])
    await engine.aclose()


@pytest.mark.parametrize("models", [[1], {"data": None}, {"data": ["m"]}])
async def test_a_server_of_something_else_is_no_endpoint(server, models):
    server.models = models
    with pytest.raises(EngineStartError, match="is no endpoint to use"):
        await engine_of(server)


@pytest.mark.parametrize(
    "troubles",
    [[(429, "0"), (503, "")], ["reset", (500, "soon")], ["cut", "reset"]],
    ids=["busy", "gone", "cut"],
)
async def test_a_server_that_is_busy_or_gone_for_a_moment_is_asked_again(server, troubles):
    server.answer = TOKEN + LAST
    server.troubles = list(troubles)
    (sample,) = await sampled(server)
    assert sample.token_ids.tolist() == [7, 8]  # nothing of what was cut
    assert len(server.times) == 3


async def test_a_server_is_left_alone_for_as_long_as_it_asks(server):
    server.answer = TOKEN + LAST
    server.troubles = [(429, "1")]
    await sampled(server)
    assert server.times[1] - server.times[0] >= 1.0


@pytest.mark.parametrize("after", ["3600", "Tue, 24 Nov 2999 00:00:00 GMT"])
async def test_a_server_that_asks_for_more_time_than_there_is_has_failed(server, after):
    server.troubles = [(429, after)]
    with pytest.raises(EngineError, match="answered 429: later"):
        await sampled(server)
    assert len(server.times) == 1


async def test_a_server_that_stays_busy_has_failed_when_the_time_is_up(server):
    server.troubles = [(503, "")] * 1000
    before = time.monotonic()
    with pytest.raises(EngineError, match="answered 503: later"):
        await sampled(server, timeout_s=1.5)
    assert len(server.times) > 1
    assert time.monotonic() - before < 20.0


async def test_what_a_server_refuses_is_not_asked_again(server):
    server.troubles = [(400, "")]
    with pytest.raises(
        PromptRefusedError, match=r"request r: http.* answered 400: later"
    ) as refused:
        await sampled(server)
    assert len(server.times) == 1
    assert refused.value.drop_as == "prompt that the server refuses", "nor by another attempt"


async def test_scores_are_asked_for_again_too(server):
    server.troubles = [(502, ""), "reset"]
    server.answer = b"<html>"
    engine = await engine_of(server)
    with pytest.raises(EngineError, match="answers no JSON"):
        await engine.score([1, 2])
    await engine.aclose()
    assert len(server.times) == 3


async def test_a_server_that_is_gone_for_good_has_failed_long_before_its_time(server):
    engine = await engine_of(server, connect_s=1.5, timeout_s=120.0)
    stop(server)
    before = time.monotonic()
    with pytest.raises(EngineError, match=r"nobody is there at http://.* not be connected to for"):
        await engine.score([1, 2])
    assert time.monotonic() - before < 15.0
    await engine.aclose()


async def test_a_server_that_is_started_again_after_seconds_is_found(server):
    engine = await engine_of(server, connect_s=20.0)
    stop(server)
    asked = asyncio.create_task(samples_of(engine))
    await asyncio.sleep(1.5)
    assert not asked.done()
    with serving(server.server_port) as again:
        again.answer = TOKEN + LAST
        (sample,) = await asked
    assert sample.token_ids.tolist() == [7, 8]
    await engine.aclose()


async def test_an_engine_that_loads_a_model_wants_to_be_told_which():
    with pytest.raises(EngineSettingsError, match=r"give EngineSetup\(model_path=\.\.\.\)"):
        await TransformersConfig().build(EngineSetup())
