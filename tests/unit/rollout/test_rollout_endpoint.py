"""A server at the other end of an endpoint that is not what it should be."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cosmos_rollout import EngineError, EngineStartError, GenerationRequest, Sampling
from cosmos_rollout.engines.endpoint import EndpointConfig
from cosmos_rollout.engines.setup import EngineSetup

MODELS = {"data": [{"id": "m", "max_model_len": 64}]}


class Desk(BaseHTTPRequestHandler):
    """Says what it was told to say."""

    def do_GET(self) -> None:
        self.say(json.dumps(self.server.models).encode())

    def do_POST(self) -> None:
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.say(self.server.answer)

    def say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
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


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Desk)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(30)


async def engine_of(server: Server):
    config = EndpointConfig(url=f"http://127.0.0.1:{server.server_port}/v1", model="m")
    return await config.build(EngineSetup(model_path=Path("m")))


def event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def sampled(server: Server):
    engine = await engine_of(server)
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1, 2), sampling=Sampling(max_new_tokens=4)
    )
    try:
        return [sample async for sample in engine.generate([request])]
    finally:
        await engine.aclose()


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
