"""Trains with each optimizer, adapter and layout of batches on one rank and on several.

python parallel_training_ranks.py DIRECTORY; see ``parallel_ranks`` for how ranks are made.
"""

import dataclasses
import sys
from pathlib import Path

import torch
from bad_step_ranks import bad_steps_of_replicas, bad_steps_of_two
from parallel_ranks import (
    Layout,
    Place,
    build_model,
    full,
    micro_batches,
    next_token_loss,
    run_ranks,
)
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from cosmos_parallel import (
    AdamW8bitConfig,
    AdamWConfig,
    Ema,
    EmaConfig,
    Learner,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    MuonConfig,
    ParallelConfig,
    ProcessContext,
    TrainingMesh,
    build_mesh,
    export_lora,
    load_causal_lm,
    plan_micro_batches,
)

LORA = ModelConfig(lora=LoraConfig(rank=4, alpha=8.0))
CASES = {
    "muon": (LearnerConfig(optimizer=MuonConfig(lr=1e-2)), ModelConfig()),
    "adamw_8bit": (LearnerConfig(optimizer=AdamW8bitConfig(lr=1e-3)), ModelConfig()),
    "ema": (
        LearnerConfig(optimizer=AdamWConfig(lr=1e-2), ema=EmaConfig(decay=0.5)),
        ModelConfig(),
    ),
    "lora": (LearnerConfig(optimizer=AdamWConfig(lr=1e-2)), LORA),
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Samples in one row, told apart by position ids, or one in each."""

    token_ids: torch.Tensor
    position_ids: torch.Tensor | None
    valid: torch.Tensor


def row_loss(model: nn.Module, batch: Rows) -> "Sums":
    inputs = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    logits = model(input_ids=batch.token_ids, use_cache=False, **inputs).logits[:, :-1]
    losses = nn.functional.cross_entropy(
        logits.transpose(1, 2), batch.token_ids[:, 1:], reduction="none"
    )
    mask = batch.valid[:, 1:]
    if batch.position_ids is not None:
        mask = mask & (batch.position_ids[:, 1:] > 0)
    return Sums((losses * mask).sum(), mask.sum(), {})


@dataclasses.dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict


def samples(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    lengths = [30, 3, 7, 2, 19, 5, 11]
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def batches_of(step: int, place: Place, *, packed: bool) -> list[Rows]:
    parts = samples(step)
    plan = plan_micro_batches(
        [len(part) for part in parts], max_tokens=32, num_ranks=place.data_size
    )[place.data_rank]
    chosen = [[parts[index] for index in batch] for batch in plan]
    return [(one_row if packed else padded)(batch) for batch in chosen]


def one_row(parts: list[torch.Tensor]) -> Rows:
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    return Rows(torch.cat(parts)[None], positions, torch.ones_like(positions, dtype=torch.bool))


def padded(parts: list[torch.Tensor]) -> Rows:
    valid = [torch.ones(len(part), dtype=torch.bool) for part in parts]
    return Rows(pad_sequence(parts, True), None, pad_sequence(valid, True, padding_value=False))


FILLER = Rows(torch.zeros(1, 2, dtype=torch.int64), None, torch.zeros(1, 2, dtype=torch.bool))


def train(name: str, directory: Path, place: Place, mesh: TrainingMesh) -> None:
    config, model_config = CASES[name]
    model = load_causal_lm(directory / "qwen3", mesh, model_config)
    learner = Learner(model, config, mesh=mesh)
    reports, validated = [], []
    for step in range(3):
        mine = micro_batches(step)[place.data_rank :: place.data_size]
        report = learner.step(mine, next_token_loss, filler=micro_batches(99)[2])
        reports.append(dataclasses.asdict(report))
        if learner.ema is not None:
            validated.append(losses_of(learner, learner.ema, place))
    weights = {key: full(value) for key, value in model.named_parameters()}
    kept = learner.ema.averages if learner.ema else {}
    averages = {key: full(value) for key, value in kept.items()}
    if model_config.lora is not None:
        export_lora(model, directory / f"adapter-{place.layout}", mesh, base=directory / "qwen3")
    if place.rank == 0:
        result = {
            "reports": reports,
            "weights": weights,
            "averages": averages,
            "validated": validated,
        }
        torch.save(result, directory / f"{name}-{place.layout}.pt")


def losses_of(learner: Learner, ema: Ema, place: Place) -> list[float]:
    """Return the loss of the weights, and that of their averages."""
    mine = micro_batches(9)[place.data_rank :: place.data_size]
    own = learner.evaluate(mine, next_token_loss, filler=micro_batches(99)[2])
    with ema.in_place():
        averaged = learner.evaluate(mine, next_token_loss, filler=micro_batches(99)[2])
    return [own.loss, averaged.loss]


def train_rows(directory: Path, place: Place, mesh: TrainingMesh, *, packed: bool) -> None:
    model = load_causal_lm(directory / "qwen3", mesh)
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=1e-2)), mesh=mesh)
    reports = []
    for step in range(3):
        mine = batches_of(step, place, packed=packed)
        reports.append(dataclasses.asdict(learner.step(mine, row_loss, filler=FILLER)))
    if place.rank == 0:
        name = f"rows-{'packed' if packed else 'padded'}-{place.layout}.pt"
        torch.save({"reports": reports}, directory / name)


def train_split_adapter(directory: Path, place: Place, process: ProcessContext) -> None:
    """Train an adapter of layers that are split over two ranks, if there are as many."""
    degrees = ParallelConfig(tp=min(2, place.layout.num_ranks))
    mesh = build_mesh(degrees, process)
    model = load_causal_lm(directory / "llama", mesh, LORA)
    learner = Learner(model, CASES["lora"][0], mesh=mesh)
    reports = []
    for step in range(3):
        mine = micro_batches(step)[mesh.data_rank :: mesh.data_size]
        report = learner.step(mine, next_token_loss, filler=micro_batches(99)[2])
        reports.append(dataclasses.asdict(report))
    export_lora(model, directory / f"adapter-tp-{place.layout}", mesh, base=directory / "llama")
    if place.rank == 0:
        torch.save({"reports": reports}, directory / f"lora-tp-{place.layout}.pt")


def train_all(directory: Path, place: Place) -> None:
    """Everything in one process group: starting one takes longer than a case."""
    mesh = place.mesh()
    if place.data_size < 4:
        for name in CASES:
            train(name, directory, place, mesh)
        train_rows(directory, place, mesh, packed=False)
    train_rows(directory, place, mesh, packed=True)
    train_split_adapter(directory, place, mesh.process)
    if place.data_size == 2:
        bad_steps_of_two(directory, place, mesh.process)


def main(directory: Path) -> None:
    build_model("qwen3", directory, tied=True)
    build_model("llama", directory, tied=False)
    for ranks in (1, 2, 4):
        run_ranks(Layout(num_ranks=ranks), lambda place: train_all(directory, place))
    bad_steps_of_replicas(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
