"""One suite for every rollout engine: what `RolloutEngine` promises, with the numbers checked.

Version v is served with the weights of seed v % 2, so that two sets of weights are enough to tell
which version sampled a token. What the log-probs have to be comes from a `Reference` that knows
nothing of engines: the whole sequence through transformers, without sampling and without queues.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from capabilities import skip_without  # noqa: E402
from engines_forked import engine_environment, may_fork  # noqa: E402
from over_versions import logits_over_versions  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from cosmos_core.trajectory import VersionSpan  # noqa: E402
from cosmos_rollout import (  # noqa: E402
    EmptyPromptError,
    EndpointConfig,
    EngineClosedError,
    EnginePausedError,
    EngineSetup,
    GeneratedSample,
    GenerationRequest,
    InProcessEngine,
    KvPolicy,
    PromptError,
    PromptTooLongError,
    RolloutEngine,
    Sampling,
    ScriptDecoder,
    SGLangConfig,
    TokenRangeError,
    TransformersConfig,
    VersionSource,
    VLLMConfig,
    WeightLoadError,
)

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from openai_server import ServedEngine  # noqa: E402

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 256
VOCABULARY = 64
PROMPT = (5, 9, 33, 12, 7)
# Attention in float32 is computed in TF32 on GPUs.
NEAR = 1e-2 if torch.cuda.is_available() else 1e-3


# ------------------------------------------------------------------------------- references
class ModelReference:
    """Log-probs of a response whose tokens were sampled under several weight versions."""

    def __init__(self, paths: Sequence[Path], kv: KvPolicy) -> None:
        self._models = [
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths
        ]
        self._kv: KvPolicy = kv

    def table(self, prompt, token_ids, spans, temperature):
        """[n, V] log-probs of all tokens at each place of a response."""
        ids = [*prompt, *token_ids.tolist()]
        logits = logits_over_versions(lambda v: self._models[v % 2], self._kv, ids, spans)
        return torch.log_softmax(logits / (temperature or 1.0), dim=-1).numpy()

    def logprobs(self, prompt, token_ids, spans, temperature):
        table = self.table(prompt, token_ids, spans, temperature)
        return table[np.arange(len(token_ids)), token_ids], table.argmax(axis=-1)


class ScriptReference:
    """Log-probs that a script gives."""

    def logprobs(self, prompt, token_ids, spans, temperature):
        versions = [span.version for span in spans for _ in range(span.length)]
        request = ask("reference", prompt, temperature=temperature)
        pairs = [script(request, i, version) for i, version in enumerate(versions)]
        return np.array([p[1] for p in pairs]), np.array([p[0] for p in pairs])


def script(request: GenerationRequest, position: int, version: int) -> tuple[int, float]:
    """Greedy: a walk that depends on prompt, position and version; sampled: on the seed too."""
    seed = request.sampling.seed if request.sampling.temperature else 0
    token = sum(request.prompt_token_ids) + 7 * position + 31 * seed + version % 2
    return token % VOCABULARY, -0.5 - 0.25 * (version % 2)


# ------------------------------------------------------------------------------- subjects
@dataclass
class Subject:
    engine: RolloutEngine
    reference: ModelReference | ScriptReference
    server: ServedEngine | None = None
    context: int = CONTEXT  # SGLang does not use all of it


@dataclass
class Staged:
    version: int
    tensors: dict


class DirectorySource:
    """A weight source over two directories."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def stage(self, version: int, endpoints: Sequence[str]) -> Staged:
        if "nowhere" in endpoints:
            raise ConnectionError("nobody listens at nowhere")
        return Staged(version, load_file(self._paths[version % 2] / "model.safetensors"))


class ReachableVersions(VersionSource):
    """The source of the scripted engine, with an endpoint that is down."""

    def stage(self, version: int, endpoints: Sequence[str]):
        if "nowhere" in endpoints:
            raise ConnectionError("nobody listens at nowhere")
        return super().stage(version, endpoints)


async def scripted(paths: Sequence[Path], kv: str) -> Subject:
    decoder = ScriptDecoder(
        script, context_length=CONTEXT, vocabulary_size=VOCABULARY, step_s=0.001
    )
    return Subject(InProcessEngine(decoder, source=ReachableVersions()), ScriptReference())


async def transformers(paths: Sequence[Path], kv: str) -> Subject:
    setup = EngineSetup(model_path=paths[0], weight_source=DirectorySource(paths))
    engine = await TransformersConfig(kv=kv, context_length=CONTEXT).build(setup)
    return Subject(engine, ModelReference(paths, kv))


@dataclass
class Times:
    version: int
    transfer_s: float = 0.0
    stall_s: float = 0.0


class ReloadClient:
    """A weight client that has vLLM read a checkpoint directory again, requests in flight."""

    def __init__(self, llm, kv: str, paths: Sequence[Path]) -> None:
        self._llm, self._kv, self._paths = llm, kv, paths
        self._num_loads = 0

    @property
    def cache_salt(self) -> str:
        return str(self._num_loads)

    async def connect(self, endpoints: Sequence[str]) -> None:
        if "nowhere" in endpoints:
            raise ConnectionError("nobody listens at nowhere")

    async def load(self, version: int) -> Times:
        started = time.monotonic()
        await self._llm.pause_generation(mode="keep", clear_cache=self._kv == "recompute")
        self._num_loads += 1
        arguments = {"weights_path": str(self._paths[version % 2])}
        await self._llm.collective_rpc("reload_weights", kwargs=arguments)
        await self._llm.update_weight_version(str(version))
        await self._llm.resume_generation()
        return Times(version, stall_s=time.monotonic() - started)


async def vllm(paths: Sequence[Path], kv: str) -> Subject:
    pytest.importorskip("vllm")
    config = VLLMConfig(
        dtype="float32", context_length=CONTEXT, kv=kv, kv_cache_mib=16, progress_tokens=1
    )
    setup = EngineSetup(
        model_path=paths[0],
        weight_client=lambda llm, policy: ReloadClient(llm, policy, paths),
        may_fork=may_fork(),
    )
    return Subject(await config.build(setup), ModelReference(paths, kv))


async def sglang(paths: Sequence[Path], kv: str) -> Subject:
    """In the Python that COSMOS_SGLANG_PYTHON names, or in this one."""
    interpreter = os.environ.get("COSMOS_SGLANG_PYTHON")
    if interpreter is None and find_spec("sglang") is None:
        skip_without("sglang")
    setup = EngineSetup(model_path=paths[0], weight_source=DirectorySource(paths))
    on_cpu = {"attention_backend": "torch_native", "sampling_backend": "pytorch"}
    config = SGLangConfig(
        interpreter=Path(interpreter) if interpreter else None,
        device="" if torch.cuda.is_available() else "cpu",
        dtype="float32",
        context_length=CONTEXT,
        kv=kv,
        memory_share=0.1,
        extra={"max_total_tokens": 8192, **({} if torch.cuda.is_available() else on_cpu)},
    )
    engine = await config.build(setup)
    return Subject(engine, ModelReference(paths, kv), context=CONTEXT - 5)


async def endpoint(paths: Sequence[Path], kv: str) -> Subject:
    """The transformers engine behind HTTP, in a thread with a loop of its own."""
    server = ServedEngine(TransformersConfig(context_length=CONTEXT), paths[0])
    await asyncio.to_thread(server.start)
    config = EndpointConfig(url=server.url, model="tiny", vocabulary_size=VOCABULARY)
    engine = await config.build(EngineSetup(model_path=paths[0], version=0))
    return Subject(engine, ModelReference(paths, kv), server=server)


SUBJECTS: dict[str, tuple[Callable, str]] = {
    "scripted": (scripted, "keep"),
    "transformers-keep": (transformers, "keep"),
    "transformers-recompute": (transformers, "recompute"),
    "endpoint": (endpoint, "keep"),
    "vllm-keep": (vllm, "keep"),
    "vllm-recompute": (vllm, "recompute"),
    "sglang-keep": (sglang, "keep"),
    "sglang-recompute": (sglang, "recompute"),
}
MARKS = {
    # "default": vLLM's own warnings are no errors in a process that is forked from this one
    "vllm": [pytest.mark.slow, pytest.mark.filterwarnings("default")],
    "sglang": [pytest.mark.slow],
}


def parameters(names: Sequence[str]) -> list:
    return [pytest.param(name, marks=MARKS.get(name.partition("-")[0], ())) for name in names]


def only(*kinds: str) -> pytest.MarkDecorator:
    """The engines that promise this; none passes what it was not asked."""
    names = [name for name in SUBJECTS if name.partition("-")[0] in kinds]
    return pytest.mark.parametrize("subject", parameters(names), indirect=True)


OURS = only("scripted", "transformers", "vllm", "sglang")
"""To freeze and to give new weights, as a server's engine is not."""
SEEDED = only("scripted", "transformers", "endpoint", "vllm")
"""SGLang does not sample by seeds."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> list[Path]:
    """Two tiny Qwen3 models; large initial weights, so that they disagree about every token."""
    directory, paths = tmp_path_factory.mktemp("models"), []
    for seed in (0, 1):
        paths.append(directory / f"seed{seed}")
        model = random_qwen3(seed, vocabulary=VOCABULARY, context=CONTEXT)
        model.save_pretrained(paths[-1])
    return paths


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """What vLLM wants to find, and a clean-up of what it leaves in the environment."""
    before = dict(os.environ)
    os.environ.update(engine_environment())
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=parameters([*SUBJECTS]))
async def subject(request, weights, environment) -> AsyncIterator[Subject]:
    torch.set_num_threads(1)
    start, kv = SUBJECTS[request.param]
    subject = await start(weights, kv)
    try:
        yield subject
    finally:
        await subject.engine.aclose()
        if subject.server is not None:
            await asyncio.to_thread(subject.server.stop)


def ask(name: str, prompt: Sequence[int] = PROMPT, **sampling) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=Sampling(**sampling)
    )


async def collect(engine: RolloutEngine, *requests: GenerationRequest):
    return {sample.request_id: sample async for sample in engine.generate(requests)}


async def one(engine: RolloutEngine, request: GenerationRequest) -> GeneratedSample:
    return (await collect(engine, request))[request.request_id]


def command_lines() -> str:
    """What everybody on this machine can list."""
    lines = ""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # of a process that has ended
            lines += command.read_text(errors="replace")
    return lines


async def tokens_flow(engine: RolloutEngine, count: int) -> None:
    """Wait until ``count`` more tokens were sampled."""
    goal = engine.num_tokens_generated + count
    await until(lambda: engine.num_tokens_generated >= goal)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)


# ------------------------------------------------------------------------------- the contract
async def test_every_request_gets_its_own_answer_in_whatever_order(subject):
    requests = [
        ask(f"r{i}", (i + 1, 3, 5), temperature=0.0, max_new_tokens=4 * i + 4) for i in range(6)
    ]
    together = await collect(subject.engine, *requests)
    lengths = {name: len(sample.token_ids) for name, sample in together.items()}
    assert lengths == {f"r{i}": 4 * i + 4 for i in range(6)}
    for request in requests:
        alone = await one(subject.engine, request)
        assert alone.token_ids.tolist() == together[request.request_id].token_ids.tolist()


@only("sglang")
async def test_a_server_of_an_engine_answers_nobody_else(subject):
    server = subject.engine._server
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as stranger:
        assert (await stranger.get("/server_info")).status_code == 401
        assert (await stranger.post("/pause_generation", json={})).status_code == 401
    key = server.headers["Authorization"].split()[-1]
    assert key not in command_lines() + server.last_words()


async def test_a_short_answer_does_not_wait_for_a_long_one(subject):
    long = ask("long", temperature=0.0, max_new_tokens=200)
    short = ask("short", temperature=0.0, max_new_tokens=2)
    order = [sample.request_id async for sample in subject.engine.generate([long, short])]
    assert order == ["short", "long"]


async def test_a_short_answer_asked_for_while_a_long_one_is_given_does_not_wait_for_it(subject):
    engine = subject.engine
    long = asyncio.create_task(one(engine, ask("long", temperature=0.0, max_new_tokens=240)))
    await tokens_flow(engine, 5)
    short = await one(engine, ask("short", (8, 3, 5), temperature=0.0, max_new_tokens=2))
    assert len(short.token_ids) == 2
    assert not long.done()
    assert len((await long).token_ids) == 240


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
async def test_logprobs_are_those_of_the_distribution_sampled_from(subject, temperature):
    request = ask("r", temperature=temperature, max_new_tokens=40, seed=3)
    sample = await one(subject.engine, request)
    assert sample.versions == (VersionSpan(subject.engine.weight_version, 40),)
    assert (sample.token_ids.dtype, sample.logprobs.dtype) == (np.int32, np.float32)
    expected, likeliest = subject.reference.logprobs(
        PROMPT, sample.token_ids, sample.versions, temperature
    )
    np.testing.assert_allclose(sample.logprobs, expected, atol=NEAR)
    if temperature == 0.0:
        assert sample.token_ids.tolist() == likeliest.tolist()


@only("transformers", "endpoint", "vllm")
async def test_top_p_samples_and_scores_the_kept_tokens_only(subject):
    requests = [ask(f"r{i}", top_p=0.5, max_new_tokens=1, seed=i) for i in range(40)]
    samples = await collect(subject.engine, *requests)
    spans = (VersionSpan(subject.engine.weight_version, 1),)
    row = subject.reference.table(PROMPT, np.array([0]), spans, 1.0)[0]
    order = np.argsort(-row)
    kept = order[: int(np.searchsorted(np.cumsum(np.exp(row[order])), 0.5)) + 1]
    mass = np.log(np.exp(row[kept]).sum())
    tokens = {int(sample.token_ids[0]) for sample in samples.values()}
    assert tokens <= set(kept.tolist())
    assert len(tokens) > 1
    for sample in samples.values():
        expected = row[int(sample.token_ids[0])] - mass
        assert sample.logprobs[0] == pytest.approx(expected, abs=NEAR)


@only("sglang")
async def test_top_p_is_refused_where_its_logprobs_are_not_told(subject):
    with pytest.raises(PromptError, match="top_p = 1"):
        await one(subject.engine, ask("r", top_p=0.5, max_new_tokens=1))


@SEEDED
async def test_the_seed_decides_the_sample_whoever_else_is_there(subject):
    first = await one(subject.engine, ask("a", seed=11, max_new_tokens=24))
    crowd = [ask(f"c{i}", seed=100 + i, max_new_tokens=24) for i in range(5)]
    crowd.insert(3, ask("b", seed=11, max_new_tokens=24))
    again = await collect(subject.engine, *crowd)
    other = await one(subject.engine, ask("d", seed=12, max_new_tokens=24))
    assert again["b"].token_ids.tolist() == first.token_ids.tolist()
    assert other.token_ids.tolist() != first.token_ids.tolist()


def many() -> list[GenerationRequest]:
    """3,360 tokens at once, more than one step takes."""
    prompts = [((i + 1, 7, 21) * 80)[:240] for i in range(14)]
    return [ask(f"r{i}", prompt, max_new_tokens=4, seed=5) for i, prompt in enumerate(prompts)]


@only("transformers", "endpoint", "vllm", "sglang")
async def test_more_prompt_tokens_than_one_step_takes_change_no_logprobs(subject):
    requests = many()
    together = await collect(subject.engine, *requests)
    for request in requests:
        found = together[request.request_id]
        expected, _ = subject.reference.logprobs(
            request.prompt_token_ids, found.token_ids, found.versions, 1.0
        )
        np.testing.assert_allclose(found.logprobs, expected, atol=NEAR)


@SEEDED
async def test_more_prompt_tokens_than_one_step_takes_are_sampled_with_their_seeds(subject):
    requests = many()
    together = await collect(subject.engine, *requests)
    alone = await one(subject.engine, requests[-1])
    assert alone.token_ids.tolist() == together["r13"].token_ids.tolist()


async def test_a_stop_token_ends_the_answer_and_belongs_to_it(subject):
    free = await one(subject.engine, ask("free", temperature=0.0, max_new_tokens=30))
    stop = int(free.token_ids[7])
    first = free.token_ids.tolist().index(stop)
    request = ask("s", temperature=0.0, max_new_tokens=30, stop_token_ids=(stop,))
    stopped = await one(subject.engine, request)
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()


async def test_the_context_limits_the_answer(subject):
    assert subject.engine.context_length == subject.context
    prompt = tuple(i % VOCABULARY for i in range(subject.context - 3))
    sample = await one(subject.engine, ask("r", prompt, max_new_tokens=50))
    assert (len(sample.token_ids), sample.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ((), EmptyPromptError, "bad: the prompt has no tokens"),
        ((1,) * CONTEXT, PromptTooLongError, "256 tokens.*room for {room}"),
        ((1, VOCABULARY), TokenRangeError, r"token 64 .*0\.\.63"),
    ],
)
async def test_a_bad_prompt_is_a_typed_error_and_starts_nothing(subject, prompt, error, words):
    with pytest.raises(error, match=words.format(room=subject.context - 1)):
        await collect(subject.engine, ask("good"), ask("bad", prompt))
    assert subject.engine.num_running == 0
    assert len((await one(subject.engine, ask("next", max_new_tokens=2))).token_ids) == 2


@OURS
async def test_a_pause_freezes_at_a_token_boundary_and_costs_nothing(subject):
    engine = subject.engine
    request = ask("r", temperature=0.0, max_new_tokens=120)
    unpaused = await one(engine, request)
    task = asyncio.create_task(one(engine, request))
    await tokens_flow(engine, 10)
    await engine.pause()
    await engine.pause()
    frozen = engine.num_tokens_generated
    late = asyncio.create_task(one(engine, ask("late", max_new_tokens=3)))
    await asyncio.sleep(0.15)
    assert engine.num_tokens_generated == frozen
    assert not task.done()
    assert not late.done()
    await engine.resume()
    await engine.resume()
    assert (await task).token_ids.tolist() == unpaused.token_ids.tolist()
    assert len((await late).token_ids) == 3


@OURS
async def test_a_weight_change_in_mid_response_is_recorded_to_the_token(subject):
    engine = subject.engine
    old = engine.weight_version
    requests = [ask(f"r{i}", (i + 1, 3, 5), temperature=0.0, max_new_tokens=200) for i in range(4)]
    task = asyncio.create_task(collect(engine, *requests))
    await tokens_flow(engine, 80)
    report = await engine.load_version(old + 1, ["here"])
    samples = await task
    assert report.version == engine.weight_version == old + 1
    assert report.stall_s > 0.0
    assert report.transfer_s >= 0.0
    for request in requests:
        sample, prompt = samples[request.request_id], request.prompt_token_ids
        assert [span.version for span in sample.versions] == [old, old + 1]
        assert sum(span.length for span in sample.versions) == 200
        tokens = sample.token_ids
        expected, likeliest = subject.reference.logprobs(prompt, tokens, sample.versions, 0.0)
        np.testing.assert_allclose(sample.logprobs, expected, atol=NEAR)
        assert tokens.tolist() == likeliest.tolist()
        spans = (VersionSpan(old, 200),)
        unswitched, _ = subject.reference.logprobs(prompt, tokens, spans, 0.0)
        assert np.abs(sample.logprobs - unswitched).max() > 0.1  # the two weights do differ


@OURS
async def test_a_new_request_after_a_weight_change_never_sees_old_keys_and_values(subject):
    engine = subject.engine
    prompt = tuple(range(60, 0, -1)) * 2  # longer than a block of any prefix cache here
    await one(engine, ask("before", prompt, temperature=0.0, max_new_tokens=8))
    await engine.load_version(engine.weight_version + 1, ["here"])
    sample = await one(engine, ask("after", prompt, temperature=0.0, max_new_tokens=40))
    assert sample.versions == (VersionSpan(engine.weight_version, 40),)
    expected, likeliest = subject.reference.logprobs(prompt, sample.token_ids, sample.versions, 0.0)
    np.testing.assert_allclose(sample.logprobs, expected, atol=NEAR)
    assert sample.token_ids.tolist() == likeliest.tolist()


@OURS
async def test_weights_that_cannot_be_had_leave_the_old_ones_in_use(subject):
    engine = subject.engine
    request = ask("r", temperature=0.0, max_new_tokens=20)
    before, version = await one(engine, request), engine.weight_version
    with pytest.raises(WeightLoadError, match="nobody listens at nowhere"):
        await engine.load_version(version + 1, ["nowhere"])
    assert engine.weight_version == version
    assert (await one(engine, request)).token_ids.tolist() == before.token_ids.tolist()


@only("endpoint")
async def test_weights_of_a_server_are_its_own(subject):
    with pytest.raises(WeightLoadError, match="keeps the weights it has"):
        await subject.engine.load_version(1, ["here"])
    assert subject.engine.weight_version == 0


@only("endpoint")
async def test_a_server_scores_tokens_that_it_is_given(subject):
    tokens = np.array([3, 60, 2, 41, 17, 17])
    expected, _ = subject.reference.logprobs(PROMPT, tokens, (VersionSpan(0, len(tokens)),), 1.0)
    scored = await subject.engine.logprobs([*PROMPT, *tokens.tolist()])
    assert (scored.dtype, scored[0]) == (np.float32, 0.0)
    np.testing.assert_allclose(scored[len(PROMPT) :], expected, atol=NEAR)


@OURS
async def test_loading_into_a_paused_engine_is_refused(subject):
    await subject.engine.pause()
    try:
        with pytest.raises(EnginePausedError, match="resume"):
            await subject.engine.load_version(subject.engine.weight_version + 1, ["here"])
    finally:
        await subject.engine.resume()


async def test_closing_the_iterator_aborts_what_is_left_and_nothing_else(subject):
    engine = subject.engine
    kept = asyncio.create_task(one(engine, ask("kept", temperature=0.0, max_new_tokens=60)))
    samples = engine.generate([ask("short", max_new_tokens=2), ask("long", max_new_tokens=240)])
    first = await anext(samples)
    await samples.aclose()
    assert first.request_id == "short"
    assert len((await kept).token_ids) == 60
    assert engine.num_running == 0
    again = await one(engine, ask("long", max_new_tokens=3))  # its name is free again
    assert len(again.token_ids) == 3


async def test_a_cancelled_task_aborts_its_requests(subject):
    engine = subject.engine
    task = asyncio.create_task(one(engine, ask("r", max_new_tokens=240)))
    await tokens_flow(engine, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.num_running == 0)


async def test_a_closed_engine_fails_what_is_in_flight_and_what_comes_later(subject):
    """Last in this file: it closes the engine that the others share."""
    engine = subject.engine
    task = asyncio.create_task(one(engine, ask("r", max_new_tokens=240)))
    await tokens_flow(engine, 5)
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await task
    with pytest.raises(EngineClosedError):
        await one(engine, ask("late"))
