"""What happens to vLLM's processes, and to requests, when somebody is killed."""

import asyncio
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from processes import descendants, is_alive, title_of

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

from engines_forked import may_fork  # noqa: E402
from forked_scripts import ENGINES, Forked, finished, warm  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    EngineDeadError,
    EngineSetup,
    EngineStartError,
    GenerationRequest,
    Sampling,
    VLLMConfig,
    cpu_environment,
)
from cosmos_weightsync import WeightSender, shards_of  # noqa: E402
from cosmos_weightsync.integrations.vllm import (  # noqa: E402
    EngineBrokenError,
    VLLMWeightClient,
    engine_arguments,
)

# "default": vLLM's own warnings are no errors in a process that is forked from this one either
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

OWNER = """
import asyncio, sys
from pathlib import Path
from cosmos_rollout import EngineSetup, GenerationRequest, Sampling, VLLMConfig

async def main():
    workers = int(sys.argv[2])
    config = VLLMConfig(
        dtype="float32", context_length=256, kv_cache_mib=16, tensor_parallel=workers
    )
    setup = EngineSetup(model_path=Path(sys.argv[1]), may_fork=workers > 1)
    engine = await config.build(setup)
    request = GenerationRequest(
        request_id="r", prompt_token_ids=(1, 2), sampling=Sampling(max_new_tokens=200)
    )
    sample = await anext(engine.generate([request]))
    sys.stdout.write(f"sampled {len(sample.token_ids)}\\n")
    sys.stdout.flush()
    while True:
        async for sample in engine.generate([request]):
            pass

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def environment():
    before = dict(os.environ)
    os.environ.update(cpu_environment())
    yield
    os.environ.clear()
    os.environ.update(before)


def until_gone(processes: set[int]) -> list[int]:
    """Wait for the end of those that are vLLM's; return who is left."""
    deadline = time.monotonic() + 10
    while left := [pid for pid in processes if is_alive(pid) and "vllm" in title_of(pid).lower()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(("workers", "processes"), [(1, 1), (2, 3)], ids=["started", "forked"])
def test_kill_9_of_the_owner_leaves_no_orphan(model, tmp_path, workers, processes):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = Forked([script, model, workers], warm(ENGINES))
    try:
        assert owner.stdout is not None
        assert "sampled 200\n" in owner.stdout  # reads on until it is there
        children = descendants(owner.pid)
        assert len(children) >= processes
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        deadline = time.monotonic() + 10
        while any(is_alive(pid) for pid in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in children if is_alive(pid)] == []
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdout.close()


def ask(name: str) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=240)
    return GenerationRequest(request_id=name, prompt_token_ids=(1, 2), sampling=sampling)


def send_engines(number: int) -> None:
    for process in multiprocessing.active_children():
        if process.name == "EngineCore":
            os.kill(process.pid, number)


async def test_a_dead_engine_process_fails_requests_in_flight_and_later_ones(model):
    config = VLLMConfig(
        dtype="float32", context_length=256, kv_cache_mib=16, progress_tokens=1, shutdown_s=5.0
    )
    before = descendants(os.getpid())
    engine = await config.build(EngineSetup(model_path=model, version=3, may_fork=may_fork()))
    children = descendants(os.getpid()) - before
    assert engine.weight_version == 3

    try:
        samples = engine.generate([ask("a"), ask("b")])
        task = asyncio.ensure_future(anext(samples))
        async with asyncio.timeout(60):
            while not engine.num_tokens_generated:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
        send_engines(signal.SIGKILL)
        async with asyncio.timeout(20):
            with pytest.raises(EngineDeadError):
                await task
            await samples.aclose()
            with pytest.raises(EngineDeadError):
                await anext(engine.generate([ask("c")]))
        assert engine.num_running == 0
    finally:
        async with asyncio.timeout(30):
            await engine.aclose()
    assert until_gone(children) == []


async def test_an_engine_process_that_hangs_ends_a_load_and_what_is_in_flight(model):
    clients: list[VLLMWeightClient] = []

    def client(llm, kv) -> VLLMWeightClient:
        clients.append(VLLMWeightClient(llm, salted=True, timeout_s=10.0, answer_s=2.0))
        return clients[-1]

    config = VLLMConfig(
        dtype="float32", context_length=256, kv_cache_mib=16, progress_tokens=1, shutdown_s=1.0
    )
    before = descendants(os.getpid())
    setup = EngineSetup(
        model_path=model,
        weight_client=client,
        engine_arguments=engine_arguments(),
        may_fork=may_fork(),
    )
    engine = await config.build(setup)
    children = descendants(os.getpid()) - before
    sender = WeightSender(shards_of(Qwen3ForCausalLM.from_pretrained(model)))
    try:
        await asyncio.to_thread(sender.publish, 1)
        await engine.load_version(1, [sender.endpoint])
        send_engines(signal.SIGSTOP)
        samples = engine.generate([ask("a")])
        task = asyncio.ensure_future(anext(samples))
        async with asyncio.timeout(20):
            while not engine.num_running:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
        async with asyncio.timeout(60):  # it is asked once more for 10 s
            with pytest.raises(EngineBrokenError, match="no answer for 2 s"):
                await clients[0].load(2)
            with pytest.raises(EngineDeadError, match="hangs"):
                await engine.load_version(2, [sender.endpoint])
            with pytest.raises(EngineDeadError, match="hangs"):
                await task
            await samples.aclose()
        assert engine.num_running == 0
    finally:
        async with asyncio.timeout(30):
            await engine.aclose()
        sender.close()
    assert until_gone(children) == []


async def test_a_model_that_is_not_there_is_a_start_error_that_names_it(tmp_path):
    with pytest.raises(EngineStartError, match="nothing-here"):
        await VLLMConfig().build(EngineSetup(model_path=tmp_path / "nothing-here"))


WITHIN = """
import asyncio, resource, sys
from pathlib import Path
from cosmos_rollout import EngineMemoryError, EngineSetup, VLLMConfig

async def main():
    config = VLLMConfig(dtype="float32", context_length=256, kv_cache_mib=4000)
    try:
        await config.build(EngineSetup(model_path=Path(sys.argv[1]), may_fork=True))
    except EngineMemoryError as error:
        sys.stdout.write(str(error))

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (4000 << 20, 4000 << 20))
    asyncio.run(main())
"""


def test_an_engine_that_runs_out_of_memory_says_what_to_change(model, tmp_path):
    script = tmp_path / "within.py"
    script.write_text(WITHIN)
    said = finished([script, model], warm(ENGINES), 120)
    assert "can't allocate memory: you tried to allocate 4194304000 bytes" in said
    assert "kv_cache_mib is 4000: set it lower" in said
