"""What a plain vLLM says after a prompt, from a checkpoint directory: one JSON line.

Run as ``python vllm_tokens_process.py '{"model": "/path", "prompt": [1], "num_tokens": 8}'``.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import LLM, SamplingParams

torch.set_num_threads(1)
SETUP = json.loads(sys.argv[1])


def main() -> None:
    engine = LLM(
        SETUP["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        kv_cache_memory_bytes=32 << 20,
    )
    sampling = SamplingParams(
        max_tokens=SETUP["num_tokens"], temperature=0, detokenize=False, ignore_eos=True
    )
    (output,) = engine.generate([{"prompt_token_ids": SETUP["prompt"]}], sampling)
    sys.stdout.write(json.dumps({"tokens": list(output.outputs[0].token_ids)}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


main()
