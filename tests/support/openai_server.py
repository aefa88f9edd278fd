"""A small server with OpenAI's completions, over the transformers engine, for tests.

It speaks as vLLM's server does where the two agree: token ids in, token ids and log-probs out,
streamed; ``prompt_logprobs`` of tokens that are given, and the tokens of a text. It runs in a
thread with a loop of its own, or in a process: ``python openai_server.py MODEL DIES_AFTER``.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_rollout import (
    EngineSetup,
    GenerationRequest,
    RolloutEngine,
    Sampling,
    TransformersConfig,
)


class ServedEngine:
    """The engine of a model directory, served as model "tiny" on a port of the system's choice."""

    def __init__(
        self, config: TransformersConfig, path: Path, *, key: str = "", dies_after: int = 0
    ) -> None:
        """Serve a model directory.

        Args:
            config: of the engine.
            path: the directory.
            key: bearer token that is asked for; empty for none.
            dies_after: answers to prompts after which the process kills itself; 0 for never.
        """
        self._config = config
        self._path = path
        self._key = key
        self._dies_after = dies_after
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._server: uvicorn.Server | None = None
        self._engine: RolloutEngine | None = None
        self._num_requests = 0
        self.url = ""

    def start(self) -> None:
        """Start the thread; return once it listens."""
        self._thread.start()
        if not self._ready.wait(120):
            raise TimeoutError("the server did not start within 120 s")

    def stop(self) -> None:
        """End the thread."""
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join(60)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._engine = await self._config.build(EngineSetup(model_path=self._path))
        self._model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()
        config = uvicorn.Config(self._app(), host="127.0.0.1", port=0, log_level="error")
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._ready.set()
        await serving
        await self._engine.aclose()

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models(request: Request) -> Any:
            if self._is_stranger(request):
                return Response("who are you?", status_code=401)
            assert self._engine is not None
            return {"data": [{"id": "tiny", "max_model_len": self._engine.context_length}]}

        @app.post("/v1/completions")
        async def completions(request: Request) -> Any:
            if self._is_stranger(request):
                return Response("who are you?", status_code=401)
            body = await request.json()
            if isinstance(body["prompt"], str):
                return self._told(body["prompt"])
            if "prompt_logprobs" in body:
                return self._scored(body["prompt"])
            return StreamingResponse(self._events(body), media_type="text/event-stream")

        return app

    def _is_stranger(self, request: Request) -> bool:
        shown = request.headers.get("authorization")
        return bool(self._key) and shown != f"Bearer {self._key}"

    def _told(self, text: str) -> dict[str, Any]:
        """Answer a text with its tokens alone."""
        tokenizer: Any = AutoTokenizer.from_pretrained(self._path)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return {"choices": [{"prompt_token_ids": tokens}]}

    async def _events(self, body: dict[str, Any]) -> Any:
        """Generate token after token: each is a request of its own that goes on from the last."""
        self._num_requests += 1
        if self._dies_after and self._num_requests > self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        name, prompt = self._num_requests, list(body["prompt"])
        for position in range(body["max_tokens"]):
            token, logprob = await self._next(f"{name}.{position}", prompt, body, position)
            prompt.append(token)
            reason = "stop" if token in body["stop_token_ids"] else None
            if position + 1 == body["max_tokens"]:
                reason = reason or "length"
            logprobs = {"token_logprobs": [logprob]}
            choice = {"token_ids": [token], "logprobs": logprobs, "finish_reason": reason}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            if reason:
                break
        yield "data: [DONE]\n\n"

    async def _next(
        self, name: str, prompt: list[int], body: dict[str, Any], position: int
    ) -> tuple[int, float]:
        assert self._engine is not None
        sampling = Sampling(
            temperature=body["temperature"],
            top_p=body["top_p"],
            max_new_tokens=1,
            seed=body["seed"] + position,
        )
        request = GenerationRequest(
            request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling
        )
        async with aclosing(self._engine.generate([request])) as samples:
            sample = await anext(samples)
        return int(sample.token_ids[0]), float(sample.logprobs[0])

    @torch.no_grad()
    def _scored(self, prompt: list[int]) -> dict[str, Any]:
        logits = self._model(torch.tensor([prompt])).logits[0, :-1]
        table = torch.log_softmax(logits, dim=-1)
        found = [
            {str(token): {"logprob": float(row[token])}}
            for token, row in zip(prompt[1:], table, strict=True)
        ]
        return {"choices": [{"index": 0, "prompt_logprobs": [None, *found]}]}


def start_process(model: Path, *, dies_after: int = 0) -> tuple[subprocess.Popen[str], str]:
    """Start a server in a process of its own; return it and its URL once it listens."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(model), str(dies_after)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url.startswith("http://"), f"the server of {model} ended: {process.poll()}"
    return process, url


def main(model: Path, dies_after: int) -> None:
    """Serve until killed, and say where on standard output."""
    server = ServedEngine(TransformersConfig(), model, dies_after=dies_after)
    server.start()
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
