"""An evaluation from its first prompt to its figures: a rollout's producer over somebody's server.

inputs ─► server: does it fit ─► rewards, environment ─► producer ◄─► round ─► figures
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cosmos_app.errors import ServerFailedError
from cosmos_app.evaluation.figures import Evaluation, Tally, print_evaluation
from cosmos_app.evaluation.fitting import lengths_of, require_room
from cosmos_app.evaluation.inputs import Inputs, open_inputs
from cosmos_app.evaluation.progress import Note, showing_progress
from cosmos_app.length_reward import scorer_of
from cosmos_app.output import finite, print_json
from cosmos_app.prepare import NEED_ANSWERS
from cosmos_app.prepared_data import open_prompts
from cosmos_app.samples import append_samples, text_of
from cosmos_app.server_tokens import compare_tokens
from cosmos_core.control import FAILURES_ALLOWED, LoneRound, ValidationResult, payload_key
from cosmos_core.messages import GroupFailed
from cosmos_core.trajectory import Trajectory
from cosmos_rollout import (
    EndpointConfig,
    EndpointEngine,
    EngineSetup,
    Producer,
    ProducerConfig,
    ProducerParts,
    Sampling,
    stop_tokens,
)

_REPLICA = "server"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What an evaluation is to do.

    Attributes:
        recipe: a recipe, or the directory of a run.
        overrides: of the recipe, each ``path=value``.
        server: who answers.
        samples: file that every answer is added to; ``None`` for none.
    """

    recipe: Path
    overrides: Sequence[str]
    server: EndpointConfig
    samples: Path | None = None


async def evaluate_server(asked: Asked, *, as_json: bool) -> int:
    """Have a server answer held-out prompts, show what they earned; return 0.

    Raises:
        ConfigError: if the recipe is wrong.
        DataError: if there is nothing to ask, no reward, or no tokenizer.
        EngineStartError: if the server cannot be reached, or does not have the model.
        ServerMismatchError: if it has other tokens, or too short a context.
        ServerFailedError: if it fails again and again, or no answer has a reward.
    """
    console = Console(stderr=as_json)
    with open_inputs(asked.recipe, asked.overrides) as inputs:
        found = await _Evaluating(asked, inputs, console).run()
    if as_json:
        print_json(finite(asdict(found)))
    else:
        print_evaluation(found, console)
    return 0


class _Evaluating:
    """One evaluation."""

    def __init__(self, asked: Asked, inputs: Inputs, console: Console) -> None:
        from transformers import AutoTokenizer

        recipe, model = inputs.recipe, inputs.files.model
        self._asked = asked
        self._inputs = inputs
        self._console = console
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        ends = stop_tokens(self._tokenizer, model)
        self._trained: Sampling = recipe.rollout.sampling.build(recipe.seed, ends)
        self._plan = recipe.validation.plan(inputs.num_held_out)
        self._prompts = open_prompts(recipe, inputs.files)
        self._tally = Tally()

    async def run(self) -> Evaluation:
        """Ask, and return the figures; the errors are those of `evaluate_server`."""
        recipe = self._inputs.recipe
        async with contextlib.AsyncExitStack() as ended:
            engine = await self._asked.server.build(EngineSetup())
            ended.push_async_callback(engine.aclose)
            await self._require_fit(engine)
            pool = recipe.reward.build()
            ended.push_async_callback(pool.aclose)
            await pool.start()
            chosen = recipe.rollout.environment
            environment = chosen.build() if chosen is not None else None
            if environment is not None:
                ended.push_async_callback(environment.aclose)
            parts = ProducerParts(
                engine=engine,
                prompts=self._prompts,
                tokenizer=self._tokenizer,
                scorer=scorer_of(pool, recipe.length_reward),
                publish=self._publish,
                environment=environment,
            )
            producer = Producer(parts, self._how(), replica=_REPLICA)
            ended.push_async_callback(producer.aclose)
            begun_s = time.monotonic()
            with showing_progress(self._plan.num_prompts, self._console) as note:
                result = await self._answered(producer, note)
            seconds = time.monotonic() - begun_s
        return self._figures(result, producer.failures, seconds)

    def _how(self) -> ProducerConfig:
        recipe, most = self._inputs.recipe, self._asked.server.max_running
        return ProducerConfig(
            slots=most,
            scoring=most,
            sampling=self._trained,
            validation=recipe.validation.sampling(self._trained),
            episode=recipe.rollout.episode,
        )

    async def _require_fit(self, engine: EndpointEngine) -> None:
        """Look whether the server can be asked, before it is."""
        recipe, source = self._inputs.recipe, self._prompts["validation"]
        rows = [source.row(ordinal) for ordinal in range(self._plan.num_prompts)]
        url = self._asked.server.url
        if warning := await compare_tokens(engine.tokens_of, url, self._tokenizer, rows):
            self._console.print(f"[yellow]{escape(warning)}[/]", soft_wrap=True)
        if recipe.rollout.environment is None:  # it has words of its own
            require_room(
                engine.context_length,
                lengths_of(rows, self._tokenizer),
                most_new=recipe.validation.sampling(self._trained).max_new_tokens,
                most_there=recipe.rollout.engine.context_length,
            )

    async def _answered(self, producer: Producer, note: Note) -> ValidationResult:
        """Give out prompts and take answers in until none is left."""
        how = self._how()
        asking = LoneRound(self._plan, replica=_REPLICA, slots=how.slots + how.scoring)
        in_a_row = 0
        for order in asking.give_out():
            producer.submit(order)
        async for event in producer.events():
            asking.take_in(event)
            self._tally.note(event)
            is_server = isinstance(event, GroupFailed) and not event.drop_as
            in_a_row = in_a_row + 1 if is_server else 0
            if isinstance(event, GroupFailed) and in_a_row >= FAILURES_ALLOWED:
                raise ServerFailedError(
                    f"{self._asked.server.url} failed {in_a_row} times in a row, with "
                    f"{asking.num_left} prompts left: {event.reason}"
                )
            note(self._plan.num_prompts - asking.num_left, asking.rewards)
            if (result := asking.result) is not None:
                return result
            for order in asking.give_out():
                producer.submit(order)
        raise AssertionError("a producer's events have no end")

    def _figures(
        self, result: ValidationResult, failures: dict[str, int], seconds: float
    ) -> Evaluation:
        recipe, server = self._inputs.recipe, self._asked.server
        if not result.count:
            reasons = {**self._tally.dropped, **failures}
            said = ", ".join(f"{count} of {why}" for why, count in sorted(reasons.items()))
            raise ServerFailedError(
                f"none of {result.failed} prompts has an answer with a reward; failed: {said}"
            )
        compared = [one.name for one in recipe.reward.rewards if one.kind in NEED_ANSWERS]
        return Evaluation(
            url=server.url,
            model=server.model,
            accuracy=self._tally.accuracy(compared),
            failures=failures,
            seconds=seconds,
            measured=self._inputs.measured,
            **self._tally.figures(result),
        )

    async def _publish(self, trajectories: Sequence[Trajectory]) -> Sequence[str]:
        if self._asked.samples is not None:
            append_samples(self._asked.samples, [text_of(t, self._decode) for t in trajectories])
        return [payload_key(t.group, t.attempt, t.sibling) for t in trajectories]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
