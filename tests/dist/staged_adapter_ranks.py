"""Trains adapters in two stages, and sends them, alone and added to the weights, to a receiver.

python staged_adapter_ranks.py DIRECTORY; what the receiver has and what is exported is left there.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_ranks import Layout, Place, build_model, micro_batches, next_token_loss, run_ranks
from safetensors.torch import save_file

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PeftView,
    build_mesh,
    export_lora,
    init_distributed,
    load_causal_lm,
)
from cosmos_weightsync import WeightReceiver, WeightSender
from cosmos_weightsync.encodings import adapter_files, adapter_shards, merged_shards


def send_all(directory: Path, place: Place) -> None:
    """Train two steps, and send; every rank sends what its stage has."""
    process = init_distributed(
        place.rank,
        place.layout.num_ranks,
        init_method=f"file://{place.meeting}/ranks",
        timeout_s=100,
    )
    mesh = build_mesh(ParallelConfig(pp=2), process)
    adapted = ModelConfig(implementation="transformers", lora=LoraConfig(rank=4))
    model = load_causal_lm(directory / "qwen3", mesh, adapted)
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=1e-2)), mesh=mesh)
    for step in range(2):
        learner.step(micro_batches(step), next_token_loss)
    export_lora(model, directory / "adapter", mesh, base=directory / "qwen3")
    for name, published in {
        "sent": adapter_shards(PeftView(model)),
        "merged": merged_shards(PeftView(model)),
    }.items():
        with WeightSender(published, rank=place.rank, num_ranks=2) as sender:
            sender.publish(1)
            endpoints: list = [None, None]
            dist.all_gather_object(endpoints, sender.endpoint)
            if place.rank == 0:
                with WeightReceiver(endpoints) as receiver:
                    receiver.stage(1)
                    staged = receiver.staged_shards()
                    alone = name == "sent"
                    tensors = (
                        adapter_files(staged)[0]
                        if alone
                        else {each.spec.name: each.tensor.clone() for each in staged}
                    )
                    save_file(tensors, directory / f"{name}.safetensors")
            dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    build_model("qwen3", where, tied=False)
    run_ranks(Layout(num_ranks=2), lambda place: send_all(where, place))
