"""Trains a model that sees, on one rank and on several; some have pictures, and some have none.

python picture_ranks.py DIRECTORY ROWS [all]; DIRECTORY/model is the model, and DIRECTORY/ROWS.jsonl
its data: rows of pictures, or of videos too.
"""

import dataclasses
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_ranks import Layout, Place, full, run_ranks
from transformers import AutoTokenizer

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PictureReader,
    SftBatchConfig,
    SftData,
    TrainingMesh,
    build_mesh,
    empty_batch,
    export_hf,
    init_distributed,
    lay_out,
    load_causal_lm,
    load_sft_data,
    sft_loss,
)

ONE = Layout()
TWO, FOUR = Layout(num_ranks=2), Layout(num_ranks=4)
PADDED, PACKED = SftBatchConfig(bucket=1), SftBatchConfig(bucket=1, layout="packed")
ADAPTED = ModelConfig(lora=LoraConfig(rank=4, alpha=8.0))
CASES = {
    "plain": (ModelConfig(), PADDED),
    "packed": (ModelConfig(), PACKED),
    "recomputed": (ModelConfig(activation_checkpointing="full"), PADDED),
    "adapted": (ADAPTED, PADDED),
    "language": (ModelConfig(freeze=("model.visual.*",)), PADDED),
    "videos": (ModelConfig(), PADDED),
    "videos-packed": (ModelConfig(), PACKED),
    "videos-adapted": (ADAPTED, PADDED),
}
PICTURES = ["plain", "packed", "recomputed", "adapted", "language"]
VIDEOS = ["videos", "videos-packed", "videos-adapted"]
RUNS = {
    "pictures": {
        "one": (ONE, ParallelConfig(), PICTURES),
        "fsdp": (TWO, ParallelConfig(), PICTURES),
        "tp": (TWO, ParallelConfig(tp=2), ["plain", "adapted"]),
        "cp": (TWO, ParallelConfig(cp=2), ["plain", "packed", "recomputed", "adapted"]),
        "tp-cp": (FOUR, ParallelConfig(tp=2, cp=2), ["plain"]),
        "hsdp": (FOUR, ParallelConfig(dp_replicate=2), ["plain"]),
        "fsdp-tp": (FOUR, ParallelConfig(tp=2), ["plain"]),
        "fsdp-cp": (FOUR, ParallelConfig(cp=2), ["packed"]),
        "ddp": (TWO, ParallelConfig(dp_replicate=2), ["plain"]),
        "replicas": (Layout(num_replicas=2), ParallelConfig(), ["plain"]),
        "pp": (TWO, ParallelConfig(pp=2), ["plain", "packed", "recomputed", "adapted", "language"]),
        "fsdp-pp": (FOUR, ParallelConfig(pp=2), ["plain", "adapted"]),
        "tp-pp": (FOUR, ParallelConfig(tp=2, pp=2), ["packed"]),
        "cp-pp": (FOUR, ParallelConfig(cp=2, pp=2), ["plain", "packed", "recomputed"]),
    },
    "videos": {
        "one": (ONE, ParallelConfig(), VIDEOS),
        "fsdp": (FOUR, ParallelConfig(), VIDEOS),
        "tp": (TWO, ParallelConfig(tp=2), ["videos"]),
        "cp": (TWO, ParallelConfig(cp=2), VIDEOS),
        "pp": (TWO, ParallelConfig(pp=2), ["videos", "videos-packed"]),
    },
}
# of runs with pictures, where all are asked for
FURTHER = {
    "tp": ["packed", "recomputed"],
    "tp-cp": ["packed", "adapted"],
    "hsdp": ["packed", "recomputed", "adapted", "language"],
    "fsdp-tp": ["packed", "recomputed", "adapted"],
    "fsdp-cp": ["plain", "recomputed", "adapted"],
}
# an eps as large as gradients, or what rounds otherwise in a small one would be a step of its own
LEARNING = LearnerConfig(optimizer=AdamWConfig(lr=1e-3, weight_decay=0.1, eps=1e-3))
# rows of four ranks in three steps; of two, each has those of two of them
STEPS = {
    # of two: pictures and none, both, and nothing at all for one of them
    "pictures": (((0,), (1,), (2,), (3,)), ((0,), (2,), (1,), (3,)), ((1,), (0,), (), ())),
    # videos, pictures, text, and nothing; then others of them, and one for all
    "videos": (((4,), (0,), (2,), ()), ((), (5, 3), (1,), (4, 5)), ((2,), (), (3,), (5,))),
}


def run_cases(directory: Path, rows: str, run: str, place: Place) -> None:
    """Train every case of a run, one after the other, in one process group."""
    layout, degrees, cases = RUNS[rows][run]
    cases = cases + FURTHER.get(run, []) if "all" in sys.argv else cases
    process = None
    if layout.num_ranks > 1:
        meeting = f"file://{place.meeting}/ranks"
        process = init_distributed(place.rank, layout.num_ranks, init_method=meeting, timeout_s=100)
    mesh = build_mesh(degrees, process)
    reader = PictureReader.of(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    data = load_sft_data(directory / f"{rows}.jsonl", tokenizer, reader=reader)
    for case in cases:
        learning = Learning(*CASES[case], steps=STEPS[rows], data=data)
        found = train(directory, learning, mesh, place)
        if place.rank == 0 and place.replica == 0:
            torch.save(found, directory / f"{run}-{case}.pt")


@dataclasses.dataclass(frozen=True)
class Learning:
    model: ModelConfig
    batching: SftBatchConfig
    steps: tuple
    data: SftData


def train(directory: Path, learning: Learning, mesh: TrainingMesh, place: Place) -> dict:
    data = learning.data
    model = load_causal_lm(directory / "model", mesh, learning.model)
    learner = Learner(model, LEARNING, mesh=mesh, replica_group=place.replica_group())
    num_replicas = place.layout.num_replicas
    rank = place.replica if num_replicas > 1 else mesh.data_rank
    reports = []
    for groups in learning.steps:
        share = len(groups) // (num_replicas * mesh.data_size)
        mine = [data.examples[row] for rows in groups[rank * share :][:share] for row in rows]
        batches = lay_out(mine, learning.batching, reader=data.reader)
        report = learner.step(batches, sft_loss, filler=empty_batch(data.reader))
        reports.append(dataclasses.asdict(report))
    if learning.model.freeze and (mesh.data_size > 1 or mesh.config.pp > 1):
        name = "exported" if mesh.config.pp == 1 else "exported-pp"
        export_hf(model, directory / name, mesh, tokenizer_dir=directory / "model")
    weights = {name: full(value) for name, value in model.named_parameters()}
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    if mesh.config.pp > 1:  # rank 0 has those of its stage
        of_stages: list = [None] * mesh.process.world_size
        dist.all_gather_object(of_stages, (weights, trained))
        weights = {name: value for part, _ in of_stages for name, value in part.items()}
        trained = [name for _, part in of_stages for name in part]
    return {"reports": reports, "weights": weights, "trained": trained}


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, shown = Path(sys.argv[1]), sys.argv[2]
    for name, (run_layout, _, _) in RUNS[shown].items():
        run_ranks(run_layout, lambda at, run=name: run_cases(where, shown, run, at))
