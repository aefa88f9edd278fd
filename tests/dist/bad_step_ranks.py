"""Steps that one rank makes not finite, under each layout: what every rank then does and says.

Ranks are those of ``parallel_training_ranks``. Each writes what it saw to DIRECTORY/bad-LAYOUT-
REPLICA-RANK.json, and batches are written down in DIRECTORY/bad-LAYOUT.
"""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from parallel_ranks import Layout, Place, Tokens, micro_batches, next_token_loss, run_ranks

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    NonFiniteStepError,
    ParallelConfig,
    ProcessContext,
    TrainingMesh,
    build_mesh,
    load_causal_lm,
)
from cosmos_parallel.gradients import local_part

# of its five micro-batches a step has a bad fourth one: of the last rank of those with data
BAD = 3
STEPS = ("good", "loss", "good", "gradient", "loss")


def named(tokens: Tokens, name: str = "", bad: str = "") -> SimpleNamespace:
    """Return a batch whose sample has a name, and that any process can read from a file."""
    return SimpleNamespace(**vars(tokens), names=(name,) if name else (), bad=bad)


def loss(model, batch: SimpleNamespace):
    """Make the loss NaN, or have it finite and the gradient NaN: 0 is the root of 0 squared."""
    hidden: list[torch.Tensor] = []

    def keep(**inputs):
        output = model(**inputs)
        hidden.append(output.logits)
        return output

    result = next_token_loss(keep, batch)
    total = result.total
    if batch.bad == "loss":
        total = total * math.nan
    if batch.bad == "gradient":
        total = total + (hidden[0] * 0.0).square().sum().sqrt()
    return dataclasses.replace(result, total=total)


def named_batches(step: int, bad: str) -> list[SimpleNamespace]:
    return [
        named(tokens, f"step {step} batch {index}", bad if index == BAD else "")
        for index, tokens in enumerate(micro_batches(step))
    ]


def take_bad_steps(directory: Path, place: Place, mesh: TrainingMesh, name: str) -> None:
    """Take good and bad steps, until there are too many bad ones; every rank calls."""
    model = load_causal_lm(directory / "llama", mesh)
    config = LearnerConfig(
        optimizer=AdamWConfig(lr=1e-3),
        max_non_finite_steps=1,
        dump_directory=directory / f"bad-{name}",
    )
    learner = Learner(model, config, mesh=mesh, replica_group=place.replica_group())
    rank = place.replica * mesh.data_size + mesh.data_rank
    size = place.layout.num_replicas * mesh.data_size
    seen: list[dict] = []
    for step, bad in enumerate(STEPS):
        before = [local_part(p).detach().clone() for p in model.parameters()]
        mine = named_batches(step, "" if bad == "good" else bad)[rank::size]
        line: dict = {}
        try:
            report = learner.step(mine, loss, filler=named(micro_batches(99)[2]))
            line = {"outcome": report.outcome, "problem": report.problem}
        except NonFiniteStepError as error:
            line = {"outcome": "ended", "problem": str(error)}
        after = [local_part(p).detach() for p in model.parameters()]
        line["unchanged"] = all(map(torch.equal, before, after))
        line["skipped"] = learner.num_skipped
        seen.append(line)
    path = directory / f"bad-{name}-{place.replica}-{place.rank}.json"
    path.write_text(json.dumps(seen))


WAYS = {"fsdp": ParallelConfig(), "tp": ParallelConfig(tp=2), "pp": ParallelConfig(pp=2)}


def bad_steps_of_two(directory: Path, place: Place, process: ProcessContext) -> None:
    """Take them as two ranks that share samples, matrices or layers."""
    for name, degrees in WAYS.items():
        take_bad_steps(directory, place, build_mesh(degrees, process), name)


def bad_steps_of_replicas(directory: Path) -> None:
    """Take them as two replicas of two ranks."""
    layout = Layout(num_replicas=2, num_ranks=2)
    run_ranks(layout, lambda place: take_bad_steps(directory, place, place.mesh(), "replicas"))
