"""A plain vLLM script, without anything of ours but the backend's name and a sender.

``LLM`` is made with ``WeightTransferConfig(backend="cosmos")``; the trainer's end is driven through
vLLM's own factory. Commands and answers are JSON lines, as in the other scripts of this folder.
"""

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # The engine in this process; workers are not.

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm_children import fork_children

from cosmos_weightsync import WeightSender, shards_of
from cosmos_weightsync.integrations.vllm_trainer import CosmosTrainerInitInfo

torch.set_num_threads(1)
SETUP: dict[str, Any] = json.loads(sys.argv[1])


class Client:
    """The four methods of vLLM's ``VLLMWeightSyncClient``, over an ``LLM`` in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version=weight_version)


class Script:
    def __init__(self) -> None:
        fork_children()
        self.llm = LLM(
            model=SETUP["model"],
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_memory_bytes=16 << 20,
            tensor_parallel_size=SETUP["num_workers"],
            distributed_executor_backend="uni" if SETUP["num_workers"] == 1 else "mp",
            weight_transfer_config=WeightTransferConfig(backend="cosmos"),
        )

    def update(self, path: str) -> dict[str, Any]:
        """What a script without a trainer does: a sender, and vLLM's four calls."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with WeightSender(shards_of(model), rank=0, num_ranks=1) as sender:
            sender.publish(7)
            client = Client(self.llm)
            client.init_weight_transfer_engine({"endpoints": [sender.endpoint]})
            client.start_weight_update()
            client.update_weights({"version": 7})
            client.finish_weight_update("7")
        return {}

    def train(self, path: str) -> dict[str, Any]:
        """What a trainer does that knows vLLM's interface only."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        trainer = WeightTransferTrainerFactory.trainer_init(
            CosmosTrainerInitInfo(rank=0), client=Client(self.llm), source=ModuleSource(model)
        )
        trained = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            trainer.send_weights()
            for parameter, values in zip(model.parameters(), trained, strict=True):
                parameter.copy_(values)
        trainer.send_weights()
        trainer.shutdown()
        return {}

    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [one.outputs[0] for one in self.llm.generate(asked, sampling, use_tqdm=False)]
        tokens = [list(one.token_ids) for one in outputs]
        logprobs = [
            [found[token].logprob for token, found in zip(one.token_ids, one.logprobs, strict=True)]
            for one in outputs
        ]
        versions = [[span.version for span in one.weight_versions or ()] for one in outputs]
        return {"tokens": tokens, "logprobs": logprobs, "versions": versions}


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    script = Script()
    reply({})
    for line in sys.stdin:
        command = json.loads(line)
        reply(getattr(script, command.pop("do"))(**command))


if __name__ == "__main__":
    main()
