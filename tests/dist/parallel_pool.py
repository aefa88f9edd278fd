"""Gloo ranks that train tiny models under a list of layouts, forked from one warm process.

python parallel_pool.py DIRECTORY < cases; a case is a JSON line, its result is written to
DIRECTORY/NAME.json: loss and gradient norm of every step, or what went wrong. Cases of one process
run first, in the process that is forked then: what is imported at first use is imported once. Those
with ``last``, which need what others leave, run in their place.
"""

import dataclasses
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from first_use import import_for_ranks
from torch.nn import functional

from cosmos_parallel import (
    AdamWConfig,
    EmaConfig,
    Learner,
    LearnerConfig,
    LoraConfig,
    LowPrecisionConfig,
    ModelConfig,
    ParallelConfig,
    ProcessContext,
    build_mesh,
    export_hf,
    export_lora,
    init_distributed,
    load_causal_lm,
    model_cost,
    shutdown_distributed,
)
from cosmos_parallel.titan import prepare

NUM_STEPS = 3
TIMEOUT_S = 300
# rows and columns of the micro-batches of a step: lengths that no number of ranks divides, and few
# of them, as DTensor works out anew how each operation is divided for each
SHAPES = ((2, 13), (1, 14), (2, 13))
# where columns added to a row would be rounded with it
EVEN = ((2, 14),) * 3
# what the ranks of a case do: with the case and the directory, on each rank
Work = Callable[[dict, Path, ProcessContext], object]


@dataclasses.dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict


def micro_batches(step: int, *, packed: bool, shapes: tuple = SHAPES) -> list[dict]:
    """Return the same micro-batches of a step on every rank."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for rows, columns in shapes:
        tokens = torch.randint(0, 64, (rows, columns), generator=generator)
        kept = torch.rand(rows, columns, generator=generator) < 0.7
        positions = torch.arange(columns).repeat(rows, 1)
        if packed:
            positions[:, 4:] -= 4  # a second sample begins in column 4
        batches.append({"tokens": tokens, "kept": kept, "positions": positions})
    return batches


def loss(model: torch.nn.Module, batch: dict) -> Sums:
    """Summed cross-entropy of the kept next tokens."""
    tokens, kept = batch["tokens"], batch["kept"][:, 1:]
    logits = model(input_ids=tokens, position_ids=batch["positions"], use_cache=False).logits
    nll = functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return Sums((nll * kept).sum(), kept.sum(), {"rows": torch.tensor(float(len(tokens)))})


def train(case: dict, directory: Path, process: ProcessContext) -> list:
    """Train three steps; every rank of the case calls."""
    mesh = build_mesh(ParallelConfig(**case["degrees"]), process)
    config = ModelConfig(
        implementation=case.get("implementation", "auto"),
        activation_checkpointing=case.get("checkpointing", "none"),
        compile=case.get("compile", "none"),
        lora=LoraConfig(rank=4) if case.get("lora") else None,
        low_precision=LowPrecisionConfig(emulate=True) if case.get("eight_bits") else None,
        sequence_parallel=case.get("sequence", False),
    )
    model = load_causal_lm(directory / case["model"], mesh, config)
    # with the usual 1e-8 the sign of a gradient that is nothing but rounding moves a weight by the
    # whole rate: of Gemma 4 the last digit of weights was the fourth of the second norm
    optimizer = AdamWConfig(lr=1e-3, weight_decay=0.01, eps=1e-3)
    settings = LearnerConfig(
        optimizer=optimizer, max_grad_norm=0.5, ema=EmaConfig(decay=0.9, ramp=False)
    )
    learner = Learner(model, settings, mesh=mesh)
    shapes = EVEN if case.get("eight_bits") else SHAPES
    reports = []
    for step in range(NUM_STEPS):
        batches = micro_batches(step, packed=case.get("packed", False), shapes=shapes)
        mine = batches[mesh.data_rank :: mesh.data_size]
        report = learner.step(mine, loss, filler=batches[0])
        reports.append([report.loss, report.grad_norm, report.metrics["rows"]])
    evaluation = learner.evaluate(mine, loss, filler=batches[0])
    if case.get("export"):
        export_hf(model, directory / case["export"], mesh)
    if case.get("lora"):
        base = directory / case["model"]
        export_lora(model, directory / f"{case['name']}-adapter", mesh, base=base)
    assert learner.ema is not None
    with learner.ema.in_place():
        averaged = learner.evaluate(mine, loss, filler=batches[0])
    cost = model_cost(model, mesh)
    return [*reports, [evaluation.loss, averaged.loss, cost.per_token, cost.per_pair]]


def take_part(rank: int, case: dict, directory: Path, work: Work) -> None:
    """Run one case on one rank, and write what came of it."""
    name = case["name"]
    try:
        process = ProcessContext()
        if case["num_ranks"] > 1:
            process = init_distributed(
                rank,
                case["num_ranks"],
                init_method=f"file://{directory}/{name}.meeting",
                timeout_s=TIMEOUT_S,
            )
        result = {"steps": work(case, directory, process)}
    except Exception:  # noqa: BLE001 - reported by the test
        result = {"error": traceback.format_exc()}
    shutdown_distributed()
    if rank == 0 or "error" in result:
        suffix = "" if rank == 0 else f"-{rank}"
        (directory / f"{name}{suffix}.json").write_text(json.dumps(result))


def run_together(case: dict, directory: Path, work: Work) -> None:
    """Run a case on ranks of its own.

    torch keeps what it worked out for a mesh under the mesh's shape and ranks: a process that
    joined a second world would be handed groups of the first.
    """
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=take_part, args=(rank, case, directory, work))
        for rank in range(case["num_ranks"])
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def run_pool(work: Work) -> None:
    """Run what one process can, and fork the ranks of the rest; see above for the command line."""
    directory = Path(sys.argv[1])
    cases = [json.loads(line) for line in sys.stdin]
    prepare("cpu")
    import_for_ranks()
    torch.set_num_threads(1)
    together = [case for case in cases if case["num_ranks"] > 1 or case.get("last")]
    for case in cases:
        if case not in together:
            take_part(0, case, directory, work)
    for case in together:
        run_together(case, directory, work)


if __name__ == "__main__":
    run_pool(train)
