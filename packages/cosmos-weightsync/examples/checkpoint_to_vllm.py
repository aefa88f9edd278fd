"""python checkpoint_to_vllm.py OLD NEW: a running vLLM goes from one checkpoint to another."""

import sys

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from cosmos_weightsync import WeightSender, checkpoint_shards

if __name__ == "__main__":
    config = WeightTransferConfig(backend="cosmos")
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, weight_transfer_config=config)
    (answer,) = llm.generate("1 2 3", SamplingParams(temperature=0.0))
    sys.stdout.write(answer.outputs[0].text + "\n")
    with WeightSender(checkpoint_shards(sys.argv[2])) as sender:
        sender.publish(1)
        llm.init_weight_transfer_engine({"init_info": {"endpoints": [sender.endpoint]}})
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": 1}})
        llm.finish_weight_update(weight_version="1")
    (answer,) = llm.generate("1 2 3", SamplingParams(temperature=0.0))
    sys.stdout.write(answer.outputs[0].text + "\n")
