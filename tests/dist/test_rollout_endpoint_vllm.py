"""vLLM's own OpenAI-compatible server as an endpoint and as a teacher, against transformers."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
tokenizers = pytest.importorskip("tokenizers")

from click.testing import CliRunner  # noqa: E402
from forked_scripts import ENGINES, Forked, warm  # noqa: E402
from real_runs import SUMS  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM  # noqa: E402

from cosmos_app.cli import main as app  # noqa: E402
from cosmos_rollout import (  # noqa: E402
    EndpointConfig,
    EngineError,
    EngineSetup,
    EngineStartError,
    GenerationRequest,
    Sampling,
    TeacherReplicas,
    TeacherSettings,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # starting the server takes long

SIZE, CONTEXT = 64, 128
PROMPT = (5, 9, 33, 12, 7)
START_S = 540.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_qwen3(0, vocabulary=SIZE, context=CONTEXT).save_pretrained(path)
    # what a server makes its own habit, and a request undoes
    habits = {"top_k": 1, "min_p": 0.5, "repetition_penalty": 2.0, "temperature": 0.1}
    (path / "generation_config.json").write_text(json.dumps(habits))
    words = {f"w{i}": i for i in range(SIZE)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w1").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[tuple[Forked, EndpointConfig]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(__file__).with_name("vllm_server_process.py"), "--model", model]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(16 << 20), "--block-size", "32"]
    command += ["--max-num-seqs", "8"]
    command += ["--logprobs-mode", "processed_logprobs"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with log.open("wb") as output:
        to = output.fileno()
        process = Forked(command, warm(ENGINES), stdout=to, stderr=to)
    config = EndpointConfig(url=f"http://127.0.0.1:{port}/v1", model="tiny", vocabulary_size=SIZE)
    try:
        asyncio.run(_listening(process, config, model, log))
        yield process, config
    finally:
        with contextlib.suppress(ProcessLookupError):  # the last test has ended it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


async def _listening(process, config, model, log) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            engine = await config.build(EngineSetup(model_path=model))
        except EngineStartError:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            await asyncio.sleep(0.5)
        else:
            await engine.aclose()
            return


def reference(model: Path, token_ids, temperature: float) -> np.ndarray:
    """Log-prob of each token but the first, by one forward pass of transformers."""
    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = network(torch.tensor([list(token_ids)])).logits[0, :-1] / temperature
    table = torch.log_softmax(logits, dim=-1)
    return table[torch.arange(len(token_ids) - 1), torch.tensor(token_ids[1:])].numpy()


async def test_tokens_and_logprobs_are_those_that_the_server_sampled(server, model):
    _, config = server
    engine = await config.build(EngineSetup(model_path=model, version=12))
    try:
        assert engine.context_length == CONTEXT  # as the server says
        sampling = Sampling(temperature=0.7, max_new_tokens=20)
        requests = [
            GenerationRequest(
                request_id=f"r{i}", prompt_token_ids=PROMPT, sampling=sampling.with_seed(i)
            )
            for i in range(4)
        ]
        samples = [sample async for sample in engine.generate(requests)]
        assert {sample.request_id for sample in samples} == {"r0", "r1", "r2", "r3"}
        for sample in samples:
            assert (sample.versions, sample.finish_reason) == (((12, 20),), "length")
            whole = [*PROMPT, *sample.token_ids.tolist()]
            expected = reference(model, whole, 0.7)[len(PROMPT) - 1 :]
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3)
        stop = int(samples[0].token_ids[3])
        stopped = GenerationRequest(
            request_id="s",
            prompt_token_ids=PROMPT,
            sampling=Sampling(
                temperature=0.7,
                max_new_tokens=20,
                seed=int(samples[0].request_id[1]),
                stop_token_ids=(stop,),
            ),
        )
        (cut,) = [sample async for sample in engine.generate([stopped])]
        first = samples[0].token_ids.tolist().index(stop)
        assert cut.token_ids.tolist() == samples[0].token_ids[: first + 1].tolist()
        assert cut.finish_reason == "stop"
    finally:
        await engine.aclose()


async def test_a_teacher_scores_what_it_is_given_as_transformers_does(server, model):
    _, config = server
    teacher = await config.build(EngineSetup(model_path=model))
    try:
        tokens = [*PROMPT, 3, 60, 2, 41, 17, 17]
        scored = await teacher.logprobs(tokens)
        np.testing.assert_allclose(scored[1:], reference(model, tokens, 1.0), atol=1e-3)
    finally:
        await teacher.aclose()


async def test_a_run_s_teachers_may_be_that_server(server, model):
    """With the likeliest tokens of each place, as on-policy distillation asks for them."""
    _, config = server
    teacher = TeacherReplicas(lambda: [config.url], TeacherSettings(model="tiny", top_k=2))
    try:
        await teacher.ready(60.0)
        tokens = [*PROMPT, 3, 60, 2, 41]
        scores = await teacher.score(tokens)
    finally:
        await teacher.aclose()
    np.testing.assert_allclose(scores.logprobs[1:], reference(model, tokens, 1.0), atol=1e-3)
    assert scores.top_token_ids.shape == (len(tokens), 2)
    for place in range(1, len(tokens)):
        for token, logprob in zip(
            scores.top_token_ids[place], scores.top_logprobs[place], strict=True
        ):
            expected = reference(model, [*tokens[:place], int(token)], 1.0)[-1]
            np.testing.assert_allclose(logprob, expected, atol=1e-3)
        assert scores.top_logprobs[place, 0] >= scores.top_logprobs[place, 1]


async def test_its_tokens_of_a_text_are_those_of_its_tokenizer(server, model):
    _, config = server
    engine = await config.build(EngineSetup(model_path=model))
    try:
        assert await engine.tokens_of("w5 w9 w33 w2") == [5, 9, 33, 2]
    finally:
        await engine.aclose()


def test_its_accuracy_is_measured_by_one_command(server, model, tmp_path):
    """Of three answers that it is compared with, two are what transformers would say."""
    _, config = server
    prompts = ["w5 w9 w33", "w7 w22", "w60 w2"]
    answers = [*(greedy_answer(model, prompt) for prompt in prompts[:2]), "w0"]
    rows = [
        {"prompt": prompt, "answer": answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(
        app,
        [
            "evaluate", str(SUMS), f"model.path={model}", f"data.path={data}",
            f"data.held_out_path={data}", "rollout.sampling.max_new_tokens=5",
            "--url", config.url, "--model", "tiny", "--json",
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["num_prompts"], found["num_failed"]) == (3, 0)
    assert (found["accuracy"], found["reward"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


def greedy_answer(model: Path, prompt: str) -> str:
    tokens = [int(word[1:]) for word in prompt.split()]
    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    said: list[int] = []
    while len(said) < 5 and 1 not in said:  # as the tokenizer's last token is
        with torch.no_grad():
            said.append(int(network(torch.tensor([tokens + said])).logits[0, -1].argmax()))
    return " ".join(f"w{token}" for token in said if token != 1)


async def test_a_model_that_is_not_served_is_known_at_the_start(server, model):
    _, config = server
    wrong = EndpointConfig(url=config.url, model="large")
    with pytest.raises(EngineStartError, match=r"serves \['tiny'\], not 'large'"):
        await wrong.build(EngineSetup(model_path=model))


async def test_a_server_that_dies_fails_what_is_in_flight(server, model):
    """Last in this file: it ends the server that the others share."""
    process, config = server
    patience = replace(config, timeout_s=5.0)  # so long is it asked again
    engine = await patience.build(EngineSetup(model_path=model))
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        request = GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=Sampling())
        with pytest.raises(EngineError, match="nobody is there at http"):
            _ = [sample async for sample in engine.generate([request])]
    finally:
        await engine.aclose()
