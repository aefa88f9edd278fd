"""python serve_vllm.py MODEL: a plain vLLM that goes on with what trainers at stdin publish."""

import sys

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

if __name__ == "__main__":
    config = WeightTransferConfig(backend="cosmos")
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, weight_transfer_config=config)
    llm.init_weight_transfer_engine({"init_info": {"endpoints": sys.stdin.readline().split()}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": 3}})
    llm.finish_weight_update(weight_version="3")
    (answer,) = llm.generate("1 2 3", SamplingParams(temperature=0.0))
    sys.stdout.write(answer.outputs[0].text + "\n")
