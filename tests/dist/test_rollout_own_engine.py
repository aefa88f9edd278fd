"""Somebody has an `AsyncLLM` already: samples and weight changes in their own asyncio program.

Log-probs are compared with a forward pass of transformers; the prompt fills several blocks of the
key/value cache, so that what an older version left there would be found.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

from engines_forked import forked_llm  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402
from vllm import AsyncEngineArgs, SamplingParams  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    DuplicateRequestError,
    EngineClosedError,
    EngineSettingsError,
    GeneratedSample,
    GenerationRequest,
    RolloutEngine,
    Sampling,
    WrongLoopError,
    attach_vllm,
    cpu_environment,
)
from cosmos_weightsync import ConfigurationError, WeightSender, shards_of  # noqa: E402
from cosmos_weightsync.integrations.vllm import (  # noqa: E402
    VLLMWeightClient,
    engine_arguments,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    # "default": vLLM's own warnings are no errors in a process that is forked from this one
    pytest.mark.filterwarnings("default"),
]
PROMPT = tuple(7 * place % 64 for place in range(150))
LONG = Sampling(max_new_tokens=300, seed=5)


def build(seed: int):
    return random_qwen3(seed, vocabulary=64, context=512, tied=True).eval()


@dataclass
class Own:
    """What such a person has."""

    llm: AsyncLLM
    client: VLLMWeightClient
    engine: RolloutEngine

    async def publish(self, seed: int, version: int) -> WeightSender:
        sender = WeightSender(shards_of(build(seed)))
        await asyncio.to_thread(sender.publish, version)
        return sender

    async def load(self, seed: int, version: int) -> None:
        sender = await self.publish(seed, version)
        await self.engine.load_version(version, [sender.endpoint])
        await asyncio.to_thread(sender.close)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def own(tmp_path_factory) -> AsyncIterator[Own]:
    before = dict(os.environ)
    os.environ.update(cpu_environment())
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("model")
    build(0).save_pretrained(path)
    arguments = AsyncEngineArgs(
        model=str(path),
        dtype="float32",
        max_model_len=512,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_chunked_prefill=False,
        logprobs_mode="processed_logprobs",
        **engine_arguments(),
    )
    llm = forked_llm(arguments)
    client = VLLMWeightClient(llm, kv_cache="keep", salted=True)
    try:
        yield Own(llm, client, await attach_vllm(llm, weight_client=client))
    finally:
        await asyncio.to_thread(llm.shutdown, 10.0)
        os.environ.clear()
        os.environ.update(before)


def ask(name: str, sampling: Sampling) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=PROMPT, sampling=sampling)


async def one(own: Own, name: str, sampling: Sampling) -> GeneratedSample:
    async for sample in own.engine.generate([ask(name, sampling)]):
        return sample
    raise AssertionError("no sample")


async def by_hand(own: Own, name: str, num_tokens: int, salt: str):
    """A request of their own to the same `AsyncLLM`; the last output."""
    sampling = SamplingParams(max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(PROMPT), "cache_salt": salt}
    last = None
    async for output in own.llm.generate(prompt, sampling, name):
        last = output.outputs[0]
    return last


@torch.no_grad()
def wanted(seed: int, tokens) -> list[float]:
    ids = torch.tensor([[*PROMPT, *(int(token) for token in tokens)]])
    table = torch.log_softmax(build(seed)(ids).logits[0, len(PROMPT) - 1 : -1], dim=-1)
    return table.gather(1, ids[0, len(PROMPT) :, None])[:, 0].tolist()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)


async def test_requests_of_both_live_through_a_load_and_later_ones_are_of_the_new_weights(own):
    first = await one(own, "before", Sampling(max_new_tokens=8))
    assert first.logprobs.tolist() == pytest.approx(wanted(0, first.token_ids), abs=1e-3)
    begun = own.engine.num_tokens_generated
    flights = [
        asyncio.create_task(one(own, "flight", LONG)),
        asyncio.create_task(by_hand(own, "theirs", 300, own.client.cache_salt)),
    ]
    await until(lambda: own.engine.num_tokens_generated > begun + 20)
    await own.load(1, version=1)
    later = [await one(own, "later", Sampling(max_new_tokens=8, seed=n)) for n in range(2)]
    for sample in later:  # whose prompt the old weights had computed
        assert [span.version for span in sample.versions] == [1]
        assert sample.logprobs.tolist() == pytest.approx(wanted(1, sample.token_ids), abs=1e-3)
    theirs = await by_hand(own, "theirs later", 8, own.client.cache_salt)
    found = [next(iter(place.values())).logprob for place in theirs.logprobs]
    assert found == pytest.approx(wanted(1, theirs.token_ids), abs=1e-3)
    mine, flown = await asyncio.gather(*flights)
    assert [span.version for span in mine.versions] == [0, 1]
    assert [span.version for span in flown.weight_versions] == ["0", "1"]


async def test_other_weights_under_the_same_number_share_no_prefix_with_those_before(own):
    """As after a trainer that went back to a checkpoint and trained on."""
    await own.load(2, version=9)
    await one(own, "of the ninth", Sampling(max_new_tokens=4))
    await own.load(3, version=9)
    sample = await one(own, "of the other ninth", Sampling(max_new_tokens=8))
    assert sample.logprobs.tolist() == pytest.approx(wanted(3, sample.token_ids), abs=1e-3)


async def test_what_is_asked_while_the_engine_stands_still_is_of_the_new_weights_alone(own):
    await own.load(4, version=10)
    await one(own, "leaves keys and values", Sampling(max_new_tokens=4))
    sender, before = await own.publish(5, version=11), own.client.cache_salt
    load = asyncio.create_task(own.engine.load_version(11, [sender.endpoint]))
    while own.client.cache_salt == before:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    sample, _ = await asyncio.gather(one(own, "meanwhile", Sampling(max_new_tokens=8)), load)
    assert sample.logprobs.tolist() == pytest.approx(wanted(5, sample.token_ids), abs=1e-3)
    await asyncio.to_thread(sender.close)


async def test_a_load_given_up_in_its_swap_leaves_the_version_that_samples(own):
    sender = await own.publish(0, version=20)
    load = asyncio.create_task(own.engine.load_version(20, [sender.endpoint]))
    while not await own.llm.is_paused():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    sample = await one(own, "after", Sampling(max_new_tokens=8))
    assert [span.version for span in sample.versions] == [own.engine.weight_version] == [20]
    assert sample.logprobs.tolist() == pytest.approx(wanted(0, sample.token_ids), abs=1e-3)
    await asyncio.to_thread(sender.close)


async def fail_at_first(own: Own) -> None:
    """Own code that fails over the first of two samples."""
    short = Sampling(max_new_tokens=2)
    async for _ in own.engine.generate([ask("quick", short), ask("slow", LONG)]):
        raise ZeroDivisionError


async def test_what_their_code_gives_up_is_given_up_by_the_engine(own):
    waiting = asyncio.create_task(one(own, "their client hangs up", LONG))
    await until(lambda: own.engine.num_running == 1)
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(ZeroDivisionError):
        await fail_at_first(own)
    await until(lambda: own.engine.num_running == 0 == own.llm.get_num_unfinished_requests())


async def test_a_name_is_taken_while_its_request_is_in_flight(own):
    waiting = asyncio.create_task(one(own, "name", LONG))
    await until(lambda: own.engine.num_running == 1)
    with pytest.raises(DuplicateRequestError, match="'name' is in flight"):
        await one(own, "name", LONG)
    assert len((await waiting).token_ids) == 300


async def test_another_event_loop_is_refused_instead_of_waiting_for_ever(own):
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(asyncio.wait_for(one(own, "elsewhere", LONG), 20))
        except Exception as error:  # noqa: BLE001 - looked at below
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert isinstance(found[0], WrongLoopError)


async def test_settings_that_falsify_samples_are_refused_by_name(own):
    own.llm.model_config.logprobs_mode = "raw_logprobs"  # vLLM's default
    try:
        with pytest.raises(EngineSettingsError, match="logprobs_mode='processed_logprobs'"):
            await attach_vllm(own.llm)
    finally:
        own.llm.model_config.logprobs_mode = "processed_logprobs"
    with pytest.raises(ConfigurationError, match=r"cache_salt=client\.cache_salt"):
        VLLMWeightClient(own.llm, kv_cache="keep")


async def test_a_closed_engine_leaves_theirs_running(own):
    waiting = asyncio.create_task(one(own, "in flight", LONG))
    await until(lambda: own.engine.num_running == 1)
    await own.engine.aclose()
    with pytest.raises(EngineClosedError):
        await waiting
    assert len((await by_hand(own, "goes on", 5, "")).token_ids) == 5
