"""Ranks of one side that describe what they hold and compare it with the whole, without gathering.

Run as ``python layout_process.py CASE NUM_RANKS``: imports once, forks the ranks, and prints one
JSON line for each: its layout, and how many elements it checked.
"""

import json
import multiprocessing
import os
import socket
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cosmos_weightsync import Box, Layout, Shard, converted_shards, shards_of

torch.set_num_threads(1)


def reference(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def uneven() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3))


def hsdp(_: str) -> tuple[tuple[Shard, ...], dict[str, Tensor]]:
    """Two replicas of two shards; 7 and 3 rows over two ranks."""
    model = uneven()
    whole = reference(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return shards_of(model), whole


def fsdp_tp(_: str) -> tuple[tuple[Shard, ...], dict[str, Tensor]]:
    """Rows cut by TP and again by FSDP, evenly and not: strided shards."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(1)
    # 10 rows are 5 and 5 by TP, 3 and 2 of each by FSDP; of 2 rows FSDP's second rank has none.
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 10), nn.Linear(10, 2))
    whole = reference(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {str(i): ColwiseParallel() for i in range(4)})
    fully_shard(model, mesh=mesh["dp"])
    return shards_of(model), whole


def titan(family: str) -> tuple[tuple[Shard, ...], dict[str, Tensor]]:
    """Two pipeline stages as torchtitan splits them, each over two FSDP ranks."""
    from torchtitan.distributed.pipeline_parallel import _pipeline_module_split

    spec = registry(family)
    config = spec.model
    config.layers = config.layers[:3]
    torch.manual_seed(2)
    model = config.build()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    adapter = spec.state_dict_adapter(config, None)
    whole = {
        name: tensor.clone() for name, tensor in adapter.to_hf(dict(model.state_dict())).items()
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "lm_head"]]
    _, parts = _pipeline_module_split(model, mesh["pp"], "1F1B", torch.device("cpu"), stages)
    for part in parts:
        fully_shard(part, mesh=mesh["dp"])
    return converted_shards(parts, spec.state_dict_adapter(config, None).to_hf), whole


def registry(family: str) -> Any:
    if family == "llama3":
        from torchtitan.models.llama3 import model_registry
    else:
        from torchtitan.models.qwen3 import model_registry
    return model_registry("debugmodel", "flex")


def hugging_face(detail: str) -> tuple[tuple[Shard, ...], dict[str, Tensor]]:
    """A transformers model loaded by transformers over its own plan for tensors, or for experts."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    kind, _, axis = detail.partition(":")
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "tie_word_embeddings": False,
    }
    if kind != "llama":
        sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
        sizes |= {"num_local_experts": 4, "num_experts": 4}  # GPT-OSS says the first.
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float()
    whole = reference(plain)
    with tempfile.TemporaryDirectory() as own:
        paths = [own]
        dist.broadcast_object_list(paths, src=0)
        plain.save_pretrained(paths[0])  # Only the first rank writes.
        dist.barrier()
        by_experts = axis == "experts"
        plan = DistributedConfig(tp_size=2, tp_plan="auto", enable_expert_parallel=by_experts)
        model = AutoModelForCausalLM.from_pretrained(
            paths[0], distributed_config=plan, dtype=torch.float32
        )
        dist.barrier()
    return shards_of(model), whole


CASES = {
    "hsdp": hsdp,
    "fsdp_tp": fsdp_tp,
    "titan": titan,
    "hugging_face": hugging_face,
}


def rank_main(rank: int, num_ranks: int, case: str, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    dist.init_process_group("gloo")
    name, _, detail = case.partition(":")
    shards, whole = CASES[name](detail)
    checked, wrong = 0, []
    for shard in shards:
        spec = shard.spec
        expected = whole[spec.name][spec.box.relative_to(Box.full(spec.global_shape))]
        if not torch.equal(shard.tensor, expected):
            wrong.append(f"{spec.name} {spec.box}")
        checked += expected.numel()
    said = {
        "rank": rank,
        "layout": Layout.from_ranks([[shard.spec for shard in shards]]).to_json(),
        "checked": checked,
        "wrong": wrong,
        "whole": {key: list(tensor.shape) for key, tensor in whole.items()},
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    case, num_ranks = sys.argv[1], int(sys.argv[2])
    if case.startswith("titan"):
        registry(case.partition(":")[2])  # Imported once, before the fork.
    if case.startswith("hugging_face"):
        import transformers  # noqa: F401
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=rank_main, args=(rank, num_ranks, case, port))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


if __name__ == "__main__":
    main()
