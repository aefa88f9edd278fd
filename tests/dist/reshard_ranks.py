"""Saves a model under one layout and resumes it under others.

python reshard_ranks.py DIRECTORY KIND LAYOUT...; the first saves, and all write the losses of the
steps after the save.
The kind is "native", of torchtitan, "sight", the same with a part that is carried along, "generic",
of transformers, "tied", the same with one matrix for embedding and head, "lora", with adapters, or
"head", with few of them and a value head.
"""

import dataclasses
import json
import sys
from pathlib import Path

from parallel_ranks import Layout, Place, build_model, micro_batches, next_token_loss, run_ranks
from tiny_models import tiny_kimi, write_random

from cosmos_parallel import (
    AdamWConfig,
    CheckpointStore,
    Learner,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    build_mesh,
    init_distributed,
    load_causal_lm,
)
from cosmos_parallel.gradients import local_part

# ranks, and the degrees of what is not data parallel
LAYOUTS = {
    "one": (1, {}),
    "fsdp4": (4, {}),
    "tp2": (2, {"tp": 2}),
    "fsdp2-tp2": (4, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep2-pp2": (4, {"ep": 2, "pp": 2}),
}
KINDS = {
    "native": ModelConfig(implementation="native"),
    "sight": ModelConfig(implementation="native"),
    "generic": ModelConfig(implementation="transformers"),
    "tied": ModelConfig(implementation="transformers"),
    "lora": ModelConfig(implementation="transformers", lora=LoraConfig(rank=4)),
    # nothing but the head is trained behind the first layer
    "head": ModelConfig(
        lora=LoraConfig(rank=4, targets=("layers.0.mlp.up_proj",)), value_head=True
    ),
}
MODELS = {"sight": "kimi"}
SAVED_AFTER, LAST = 3, 5


def make_learner(place: Place, directory: Path, kind: str, degrees: dict) -> Learner:
    process = init_distributed(
        place.rank,
        place.layout.num_ranks,
        init_method=f"file://{place.meeting}/ranks",
        timeout_s=100,
    )
    mesh = build_mesh(ParallelConfig(**degrees), process)
    model = load_causal_lm(directory / MODELS.get(kind, "qwen3"), mesh, KINDS[kind])
    if kind == "lora":
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}
    optimizer = AdamWConfig(lr=1e-3, schedule=ScheduleConfig(num_warmup_steps=10))
    return Learner(model, LearnerConfig(optimizer=optimizer), mesh=mesh)


def take_step(learner: Learner, step: int) -> dict:
    mesh = learner.mesh
    mine = micro_batches(step)[mesh.data_rank :: mesh.data_size]
    report = learner.step(mine, next_token_loss, filler=micro_batches(99)[2])
    return {name: dataclasses.asdict(report)[name] for name in ("loss", "grad_norm", "lr")}


def run(directory: Path, kind: str, name: str, saver: str) -> None:
    num_ranks, degrees = LAYOUTS[name]

    def body(place: Place) -> None:
        learner = make_learner(place, directory, kind, degrees)
        store = CheckpointStore(directory / "checkpoints", learner.mesh)
        if name == saver:
            for step in range(SAVED_AFTER):
                take_step(learner, step)
            store.save(SAVED_AFTER, learner, b"cut")
        else:
            for parameter in learner.model.parameters():
                if parameter.requires_grad:
                    local_part(parameter.detach()).add_(0.1)
            assert store.load(learner).extra == b"cut"
        reports = [take_step(learner, step) for step in range(SAVED_AFTER, LAST)]
        store.close()
        if place.rank == 0:
            (directory / f"{name}.json").write_text(json.dumps(reports))

    run_ranks(Layout(num_ranks=num_ranks), body)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if sys.argv[2] in MODELS:
        write_random(tiny_kimi(), where / MODELS[sys.argv[2]])
    else:
        build_model("qwen3", where, tied=sys.argv[2] == "tied")
    for chosen in sys.argv[3:]:
        run(where, sys.argv[2], chosen, sys.argv[3])
