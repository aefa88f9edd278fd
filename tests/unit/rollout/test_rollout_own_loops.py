"""Engines in programs of somebody else: ids used twice, numbers of other libraries, loads given up.

Nothing of this may wait for ever, end an engine, or label a token with weights it is not of.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from cosmos_core.trajectory import VersionSpan
from cosmos_rollout import (
    DuplicateRequestError,
    GeneratedSample,
    GenerationRequest,
    InProcessEngine,
    Sampling,
    ScriptDecoder,
    WeightLoadError,
    WrongLoopError,
)

SHORT = Sampling(max_new_tokens=3)


def said_at(request: GenerationRequest, position: int, version: int) -> tuple[int, float]:
    return version, -1.0


@dataclass
class Staged:
    version: int
    tensors: dict = field(default_factory=dict)


class SlowSource:
    """Takes a while to fetch; says how many fetch at once."""

    def __init__(self, fetch_s: float = 0.0) -> None:
        self.fetch_s, self.most, self._now = fetch_s, 0, 0

    def stage(self, version: int, endpoints: Sequence[str]) -> Staged:
        self._now += 1
        self.most = max(self.most, self._now)
        time.sleep(self.fetch_s)
        self._now -= 1
        return Staged(version)


class SlowSwap(ScriptDecoder):
    """Takes a while to put weights in place, or cannot."""

    error: Exception | None = None

    def load(self, staged) -> None:
        time.sleep(0.2)
        if self.error is not None:
            raise self.error
        super().load(staged)


def ask(name: str, sampling: Sampling = SHORT) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=(1, 2), sampling=sampling)


async def samples(engine: InProcessEngine, *requests: GenerationRequest) -> list[GeneratedSample]:
    async with asyncio.timeout(20):
        return [sample async for sample in engine.generate(requests)]


def engine_of(decoder: ScriptDecoder | None = None, **settings) -> InProcessEngine:
    return InProcessEngine(decoder or ScriptDecoder(said_at), **settings)


async def test_an_id_used_twice_is_refused_before_anything_is_generated():
    engine = engine_of()
    with pytest.raises(DuplicateRequestError, match="'a' is in flight"):
        await samples(engine, ask("a"), ask("a"))
    await engine.pause()
    first = asyncio.create_task(samples(engine, ask("a")))
    await asyncio.sleep(0)
    with pytest.raises(DuplicateRequestError):
        await samples(engine, ask("a"))
    await engine.resume()
    assert len(await first) == len(await samples(engine, ask("a"))) == 1
    await engine.aclose()


@pytest.mark.parametrize(
    "tokens",
    [
        [5, 9],
        np.array([5, 9]),
        tuple(np.array([5, 9])),
        pytest.param("torch", id="a tensor"),
    ],
)
def test_tokens_of_any_library_are_whole_numbers(tokens):
    if isinstance(tokens, str):
        tokens = pytest.importorskip("torch").tensor([5, 9])
    request = GenerationRequest(request_id="a", prompt_token_ids=tokens, sampling=SHORT)
    assert request.prompt_token_ids == (5, 9)
    assert {type(token) for token in request.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("5 9", "tokenize it"),
        (np.array([[5, 9]]), "tokens of one prompt, found 1 rows"),  # as a tokenizer gives for "pt"
        ([5.0, 9.0], "whole numbers"),
        (np.int64(5), "sequence of token ids"),
    ],
)
def test_what_are_no_tokens_is_refused_in_words(tokens, words):
    with pytest.raises(ValueError, match=words):
        GenerationRequest(request_id="a", prompt_token_ids=tokens, sampling=SHORT)


def test_ids_seeds_and_lengths_are_what_engines_can_take():
    with pytest.raises(ValueError, match="request_id has to be a text, found 7"):
        ask(7)  # which vLLM answered by never answering anybody again
    sampling = Sampling(seed=np.int64(3), max_new_tokens=np.int32(4), stop_token_ids=[np.int64(2)])
    assert (type(sampling.seed), type(sampling.max_new_tokens)) == (int, int)
    assert sampling.stop_token_ids == (2,)
    with pytest.raises(ValueError, match="64 bits"):
        sampling.with_seed(1 << 64)
    with pytest.raises(ValueError, match=r"seed has to be a whole number, found 0\.5"):
        Sampling(seed=0.5)


async def test_a_swap_that_has_begun_is_finished_before_a_load_is_given_up():
    engine = engine_of(SlowSwap(said_at), source=SlowSource())
    load = asyncio.create_task(engine.load_version(1, []))
    await asyncio.sleep(0.1)  # it has fetched, and swaps
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    (sample,) = await samples(engine, ask("a"))
    assert engine.weight_version == 1
    assert sample.token_ids.tolist() == [1, 1, 1]
    assert sample.versions == (VersionSpan(1, 3),)
    await engine.aclose()


async def test_a_load_waits_for_the_fetching_of_one_that_was_given_up():
    source = SlowSource(0.2)
    engine = engine_of(source=source)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.load_version(1, []), 0.05)
    assert engine.weight_version == 0
    assert (await engine.load_version(2, [])).version == 2
    assert source.most == 1
    await engine.aclose()


async def test_whatever_goes_wrong_with_a_swap_is_an_error_of_loading():
    decoder = SlowSwap(said_at)
    decoder.error = RuntimeError("expected 4 columns")
    engine = engine_of(decoder, source=SlowSource())
    with pytest.raises(WeightLoadError, match=r"version 1 .*expected 4 columns"):
        await engine.load_version(1, [])
    assert (await samples(engine, ask("a")))[0].versions == (VersionSpan(0, 3),)
    await engine.aclose()


def test_an_engine_is_of_one_event_loop_and_can_be_closed_from_another():
    engine = engine_of()
    asyncio.run(samples(engine, ask("a")))
    with pytest.raises(WrongLoopError, match=r"asyncio.Runner"):
        asyncio.run(samples(engine, ask("b")))
    asyncio.run(engine.aclose())
    with asyncio.Runner() as runner:
        engine = engine_of()
        for name in "ab":
            assert len(runner.run(samples(engine, ask(name)))) == 1
        runner.run(engine.aclose())


async def test_an_engine_used_from_another_thread_says_so():
    engine = engine_of()
    await samples(engine, ask("a"))
    found: list[Exception] = []

    def elsewhere() -> None:
        try:
            asyncio.run(samples(engine, ask("b")))
        except Exception as error:  # noqa: BLE001 - looked at below
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert isinstance(found[0], WrongLoopError)
    await engine.aclose()
