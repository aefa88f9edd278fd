"""A vLLM engine in a process of its own that generates while it loads versions.

Commands and answers are JSON lines, as in the other scripts of this folder.
"""

import asyncio
import json
import sys
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_children import fork_children

from cosmos_weightsync import WeightSyncError
from cosmos_weightsync.integrations.vllm import VLLMWeightClient, engine_arguments
from cosmos_weightsync.integrations.vllm_layout import engine_layout

torch.set_num_threads(1)
SETUP: dict[str, Any] = json.loads(sys.argv[1])


class Generation:
    """One request that runs until it is stopped."""

    def __init__(
        self, engine: AsyncLLM, prompt: list[int], name: str, client: VLLMWeightClient | None
    ) -> None:
        self._engine = engine
        self._salt = client.cache_salt if client is not None else None
        self._prompt = prompt
        self._name = name
        self.output: Any = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=8000,
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        prompt = {"prompt_token_ids": self._prompt, "cache_salt": self._salt}
        async for output in self._engine.generate(prompt, sampling, request_id=self._name):
            self.output = output.outputs[0]

    @property
    def num_tokens(self) -> int:
        return len(self.output.token_ids) if self.output is not None else 0

    async def until(self, num_tokens: int) -> None:
        while True:
            if self.num_tokens >= num_tokens or self.task.done():
                return
            await asyncio.sleep(0.002)

    async def stop(self) -> dict[str, Any]:
        await self._engine.abort(self._name)
        await self.task
        tokens = list(self.output.token_ids)
        return {
            "prompt": self._prompt,
            "tokens": tokens,
            "logprobs": [
                found[token].logprob
                for token, found in zip(tokens, self.output.logprobs, strict=True)
            ],
            "spans": [[s.version, s.start, s.end] for s in self.output.weight_versions],
        }


class Engine:
    def __init__(self) -> None:
        fork_children()
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=SETUP["model"],
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                max_model_len=8192,
                max_num_seqs=4,
                tensor_parallel_size=SETUP.get("num_workers", 1),
                distributed_executor_backend="mp" if SETUP.get("num_workers", 1) > 1 else "uni",
                kv_cache_memory_bytes=32 << 20,
                logprobs_mode="raw_logprobs",
                **engine_arguments(),
            )
        )
        self.client: VLLMWeightClient | None = None
        self.count = 0

    async def connect(
        self,
        endpoints: list[str],
        transport: str,
        kv_cache: str = "recompute",
        reuse: str = "nothing",
    ) -> dict[str, Any]:
        self.client = VLLMWeightClient(
            self.engine,
            kv_cache="keep" if kv_cache == "keep" else "recompute",
            salted=True,
            init_info={"transport": transport, "reuse": reuse},
            timeout_s=60,
        )
        try:
            return {"reports": list(await self.client.connect(endpoints))}
        except WeightSyncError as error:
            return {"error": type(error).__name__, "message": str(error)}

    async def layout(self) -> dict[str, Any]:
        return (await engine_layout(self.engine)).to_json()

    async def load(self, version: int) -> dict[str, Any]:
        """Load with nothing going on."""
        assert self.client is not None
        try:
            times = await self.client.load(version)
        except WeightSyncError as error:
            return {"error": type(error).__name__, "message": str(error)}
        return {
            "version": times.version,
            "num_bytes": times.num_bytes,
            "wire_bytes": times.wire_bytes,
        }

    async def load_while_generating(self, version: int, prompts: list[list[int]]) -> dict[str, Any]:
        """Answers twice: when generation is under way, and when the load is done."""
        assert self.client is not None
        self.count += 1
        running = [
            Generation(self.engine, prompt, f"{self.count}-{index}", self.client)
            for index, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(one.until(10) for one in running))
        load = asyncio.create_task(self.client.load(version))
        await asyncio.sleep(0.05)
        before = [one.num_tokens for one in running]
        await asyncio.gather(
            *(one.until(count + 15) for one, count in zip(running, before, strict=True))
        )
        reply({"tokens_while_staging": 15 if not load.done() else 0})
        times = await load
        reached = [one.num_tokens for one in running]
        # some tokens of the version before may be on their way, many on a busy machine
        await asyncio.gather(
            *(one.until(count + 60) for one, count in zip(running, reached, strict=True))
        )
        return {
            "version": times.version,
            "samples": [await one.stop() for one in running],
        }

    async def generate(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        self.count += 1
        one = Generation(self.engine, prompt, f"{self.count}", self.client)
        await one.until(num_tokens)
        return await one.stop()


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def main() -> None:
    engine = Engine()
    reply({})
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        reply(await getattr(engine, command.pop("do"))(**command))
    engine.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
