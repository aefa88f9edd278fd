"""A teacher's process: another model that scores the samples of a run, over HTTP.

It speaks what rollouts also ask of other people's servers. Its address lies in the run directory
while it listens; a new start has a new one::

    engine ─► listens ─► teachers/NAME.url written ─► scores ─► SIGTERM, or the engine died
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse

from cosmos_app.control_files import (
    OWN_TEACHER,
    read_teacher_token,
    teacher_url_file,
)
from cosmos_app.dashboard.gate import TokenGate
from cosmos_app.errors import RunError
from cosmos_app.http_serving import http_server
from cosmos_app.listening import http_url
from cosmos_app.parent import die_with_parent
from cosmos_app.roles.engine_start import engine_that_shows, naming_its_keys
from cosmos_app.roles.gpu_turns import STARTING, engine_that_shares, start_turn
from cosmos_app.roles.lease import Standing, watched_work
from cosmos_app.roles.process import may_fork, num_sharers, open_context, own_address
from cosmos_app.roles.sockets import own_sockets
from cosmos_core.addresses import listen_on
from cosmos_core.rundir import write_atomic
from cosmos_rollout import (
    EngineError,
    EngineSetup,
    PromptError,
    Shown,
    TokenScorer,
    answer_scores,
)

_GRACE_S = 2


class Scores:
    """How many samples are being scored, and how many have been."""

    def __init__(self) -> None:
        """None."""
        self._begun = self._over = 0

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        """Count what is scored inside the block."""
        self._begun += 1
        try:
            yield
        finally:
            self._over += 1

    def standing(self) -> Standing:
        """Return where the teacher is."""
        return Standing(self._over, is_busy=self._begun > self._over)


def scoring_app(scorer: TokenScorer, died: asyncio.Event, scores: Scores) -> FastAPI:
    """Return the application that answers.

    Args:
        scorer: the engine.
        died: set when the engine cannot go on.
        scores: counts.
    """
    app = FastAPI(title="teacher", docs_url=None, redoc_url=None)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        return {"data": [{"id": OWN_TEACHER, "max_model_len": scorer.context_length}]}

    @app.post("/v1/completions")
    async def completions(  # pyright: ignore[reportUnusedFunction]
        prompt: Annotated[list[int], Body(min_length=1)],
        prompt_logprobs: Annotated[int, Body(ge=0)],
        marked_prompt: Annotated[tuple[int, ...], Body()] = (),
        images: Annotated[tuple[str, ...], Body()] = (),
    ) -> JSONResponse:
        shown = Shown(marked_token_ids=marked_prompt, images=images) if images else None
        try:
            with scores.one():
                found = await scorer.score(prompt, prompt_logprobs, shown)
        except PromptError as error:
            return _error(400, error)
        except EngineError as error:
            died.set()
            return _error(503, error)
        told = answer_scores(prompt, found)
        return JSONResponse({"choices": [{"index": 0, "prompt_logprobs": told}]})

    return app


async def run_teacher(run_dir: Path, replica: str) -> int:
    """Score until told to end; return 0.

    Raises:
        RunError: if the run has no teachers, or the engine died.
        EngineStartError: if the engine does not start.
    """
    die_with_parent()
    context = open_context(run_dir, None)
    chosen, model = context.recipe.teacher, context.recipe.model.teacher
    if model is None or not chosen.replicas:
        raise RunError(f"{replica}: this run has no teachers of its own; set teacher.replicas")
    with own_sockets():
        with naming_its_keys("teacher.engine"):
            setup = EngineSetup(model_path=model, may_fork=may_fork())
            shown = engine_that_shows(chosen.engine, context.files)
            engine = engine_that_shares(shown, num_sharers())
            async with start_turn(context.run.path / STARTING, num_sharers()):
                scorer = await engine.build_scorer(setup, top_k=chosen.top_k)
        address = teacher_url_file(context.run, replica)
        try:
            silence_s = max(chosen.deadline_s, context.recipe.launch.hung_s)
            async with watched_scores(replica, silence_s) as scores:
                await _serve(scorer, scores, address, read_teacher_token(context.run))
        finally:
            address.unlink(missing_ok=True)
            await scorer.aclose()
    return 0


@contextlib.asynccontextmanager
async def watched_scores(replica: str, silence_s: float) -> AsyncGenerator[Scores]:
    """End this process if what is scored inside the block gets no further for so long."""
    scores = Scores()
    async with watched_work(replica, scores.standing, silence_s):
        yield scores


async def _serve(scorer: TokenScorer, scores: Scores, address: Path, token: str) -> None:
    died = asyncio.Event()
    with listen_on(own_address(), 0) as taken:
        app = TokenGate(scoring_app(scorer, died, scores), token)
        server = http_server(app, grace_s=_GRACE_S)
        address.parent.mkdir(exist_ok=True)
        write_atomic(address, f"{http_url(taken)}/v1")
        serving = asyncio.create_task(server.serve(sockets=[taken]))
        ended = asyncio.create_task(died.wait())
        try:
            await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
            server.should_exit = True
            await serving
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ended
    if died.is_set():
        raise RunError("the teacher's engine died")


def _error(status: int, error: Exception) -> JSONResponse:
    return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=status)
