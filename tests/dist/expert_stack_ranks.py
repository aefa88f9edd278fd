"""Ranks that hold parts of stacks of experts: they load, export, train, save and resume.

python expert_stack_ranks.py DIRECTORY < cases, as of parallel_pool.py.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from parallel_pool import loss, micro_batches, run_pool
from tiny_models import tiny_config
from transformers import MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from cosmos_parallel import (
    AdamWConfig,
    CheckpointStore,
    Learner,
    LearnerConfig,
    MeshError,
    ModelConfig,
    ParallelConfig,
    ProcessContext,
    build_mesh,
    export_hf,
    load_causal_lm,
)
from cosmos_parallel.expert_stacks import split_experts
from cosmos_parallel.gradients import local_part
from cosmos_weightsync import shards_of

SAVED_AFTER, LAST = 2, 4


def boxes_of(model: torch.nn.Module) -> list[tuple[str, list[int], list[int]]]:
    specs = [shard.spec for shard in shards_of(model)]
    return [(spec.name, list(spec.box.start), list(spec.box.shape)) for spec in specs]


def refusals(process: ProcessContext) -> list[str]:
    """Return why experts are not split that the plan does not fit."""
    mesh = build_mesh(ParallelConfig(tp=2), process)
    assert mesh.dims is not None
    joined = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
    turned = {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"}
    reasons = []
    for kind, config, styles in (
        (GptOssExperts, tiny_config("gpt_oss"), joined),  # they have biases
        (MixtralExperts, tiny_config("mixtral"), turned),
        (MixtralExperts, MixtralConfig(hidden_size=8, intermediate_size=5), joined),
    ):
        try:
            split_experts("experts", kind(config), mesh.dims.get_mesh("tp"), styles)
        except MeshError as error:
            reasons.append(str(error))
    return reasons


def work(case: dict, directory: Path, process: ProcessContext) -> dict:
    """Train to the last step, from a checkpoint or from the start; every rank of the case calls."""
    if case.get("refuses"):
        return {"refusals": refusals(process)}
    mesh = build_mesh(ParallelConfig(**case["degrees"]), process)
    model = load_causal_lm(directory / "model", mesh, ModelConfig(implementation="transformers"))
    found: dict = {}
    if case.get("describes"):
        export_hf(model, directory / f"{case['name']}-exported", mesh)
        everyone = [None] * process.world_size
        dist.all_gather_object(everyone, boxes_of(model))
        found["boxes"] = everyone
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=1e-3)), mesh=mesh)
    store = CheckpointStore(directory / case["checkpoints"], mesh)
    steps = range(LAST)
    if case.get("resumes"):
        for parameter in model.parameters():
            local_part(parameter.detach()).add_(0.1)
        store.load(learner)
        steps = range(SAVED_AFTER, LAST)
    found["reports"] = []
    for step in steps:
        if step == SAVED_AFTER and not case.get("resumes"):
            store.save(step, learner)
        batches = micro_batches(step, packed=False)
        mine = batches[mesh.data_rank :: mesh.data_size]
        report = learner.step(mine, loss, filler=batches[0])
        found["reports"].append([report.loss, report.grad_norm])
    store.close()
    return found


if __name__ == "__main__":
    run_pool(work)
