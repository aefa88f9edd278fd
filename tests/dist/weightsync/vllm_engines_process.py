"""Real engines of one family after another: version B into an engine that was started with A.

For every family that it is asked for, an engine is started with a tiny random checkpoint B, and
another with A, which then takes B from a sender; both are asked the same. Commands and answers are
JSON lines, as in the other scripts of this folder.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # The engine in this process.

import torch
import xxhash
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.platforms import PlatformEnum
from vllm_families import dtype_of, register_here, write_checkpoint
from vllm_quantised import quantised, write_quantised

from cosmos_weightsync import Shard, WeightSender, checkpoint_shards
from cosmos_weightsync.encodings import EncodedShards
from cosmos_weightsync.integrations.vllm import engine_arguments

torch.set_num_threads(1)
SETUP: dict[str, Any] = json.loads(sys.argv[1])
PROMPTS = [[1, 2, 3], [40, 50, 60, 70], [7] * 9]


class Engine:
    """One engine at a time, from its start to its end."""

    def __init__(self, folder: Path, dtype: str) -> None:
        register_here(folder)
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=not (folder / "tokenizer.json").exists(),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            kv_cache_memory_bytes=16 << 20,
            limit_mm_per_prompt={"image": 0, "video": 0},  # Their processors want torchvision.
            **engine_arguments(),
        )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def take(self, shards: Sequence[Shard] | EncodedShards) -> str:
        """Take these weights from a sender; returns what was found out about the engine."""
        with WeightSender(shards) as sender:
            sender.publish(1)
            self.llm.init_weight_transfer_engine({"init_info": {"endpoints": [sender.endpoint]}})
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"version": 1}})
            self.llm.finish_weight_update(weight_version="1")
            (found,) = self.llm.collective_rpc("cosmos_discover")
        return found["report"]

    def outcome(self) -> dict[str, Any]:
        """What it says, how sure it is, and the bits that it computes with."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [one.outputs[0] for one in self.llm.generate(asked, sampling, use_tqdm=False)]
        logprobs = [
            [found[token].logprob for token, found in zip(one.token_ids, one.logprobs, strict=True)]
            for one in outputs
        ]
        return {
            "tokens": [list(one.token_ids) for one in outputs],
            "logprobs": logprobs,
            "bits": self.llm.apply_model(digests)[0],
        }


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Of every parameter and buffer, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    flat = {name: value.detach().contiguous().view(-1) for name, value in named}
    return {
        name: xxhash.xxh3_64_hexdigest(value.view(torch.uint8).numpy())
        for name, value in flat.items()
        if value.numel()
    }


def check(family: str, dtype: str = "") -> dict[str, Any]:
    folder = Path(SETUP["folder"]) / f"{family}{dtype}"
    old, new = folder / "a", folder / "b"
    write_checkpoint(family, 0, old)
    write_checkpoint(family, 1, new)
    dtype = dtype or dtype_of(family)
    with Engine(new, dtype) as engine:
        fresh = engine.outcome()
    with Engine(old, dtype) as engine:
        before = engine.outcome()
        shards = checkpoint_shards(new)
        report = engine.take(shards)
        after = engine.outcome()
    # An engine that takes no images has no tower for them.
    unused = sum("visual." in shard.spec.name for shard in shards)
    return {"fresh": fresh, "before": before, "after": after, "report": report, "unused": unused}


def check_quantised(kind: str, family: str) -> dict[str, Any]:
    """The same with weights that the sender quantises."""
    folder = Path(SETUP["folder"]) / f"{family}-{kind}"
    for seed, name in enumerate(["a", "b"]):
        write_checkpoint(family, seed, folder / name)
        write_quantised(kind, folder / name, folder / f"{name}-{kind}")
    with Engine(folder / f"b-{kind}", "bfloat16") as engine:
        fresh = engine.outcome()
    with Engine(folder / f"a-{kind}", "bfloat16") as engine:
        before = engine.outcome()
        report = engine.take(quantised(kind, folder / "b"))
        after = engine.outcome()
    return {"fresh": fresh, "before": before, "after": after, "report": report, "unused": 0}


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    # vLLM has these for any device and lists none for a CPU.
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    commands = {"check": check, "check_quantised": check_quantised}
    reply({})
    for line in sys.stdin:
        command = json.loads(line)
        do = commands[command.pop("do")]
        try:
            reply(do(**command))
        except Exception as error:  # noqa: BLE001 - the test shows it
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
