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
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # The engine in this process.

import torch
import xxhash
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm_families import register_here, write_checkpoint

from cosmos_weightsync import WeightSender, checkpoint_shards
from cosmos_weightsync.integrations.vllm import engine_arguments

torch.set_num_threads(1)
SETUP: dict[str, Any] = json.loads(sys.argv[1])
PROMPTS = [[1, 2, 3], [40, 50, 60, 70], [7] * 9]


class Engine:
    """One engine at a time, from its start to its end."""

    def __init__(self, folder: Path) -> None:
        register_here(folder)
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
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

    def take(self, folder: Path) -> str:
        """Take a checkpoint from a sender; returns what was found out about the engine."""
        with WeightSender(checkpoint_shards(folder)) as sender:
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


def check(family: str) -> dict[str, Any]:
    folder = Path(SETUP["folder"]) / family
    old, new = folder / "a", folder / "b"
    write_checkpoint(family, 0, old)
    write_checkpoint(family, 1, new)
    with Engine(new) as engine:
        fresh = engine.outcome()
    with Engine(old) as engine:
        before = engine.outcome()
        report = engine.take(new)
        after = engine.outcome()
    return {"fresh": fresh, "before": before, "after": after, "report": report}


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    reply({})
    for line in sys.stdin:
        command = json.loads(line)
        del command["do"]
        try:
            reply(check(**command))
        except Exception as error:  # noqa: BLE001 - the test shows it
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
