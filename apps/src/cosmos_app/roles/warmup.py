"""The warm-up process: supervised fine-tuning of the model built for this run, on its own rows."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cosmos_app.errors import DataError
from cosmos_app.parent import die_with_parent
from cosmos_app.progress_watch import ProgressWatch
from cosmos_app.roles.process import RunContext, open_context
from cosmos_app.run_bus import connect_to_run
from cosmos_core.metrics import MetricRecord
from cosmos_parallel import (
    Learner,
    ParallelConfig,
    SftBatchConfig,
    SftData,
    StepReport,
    build_mesh,
    empty_batch,
    export_hf,
    load_causal_lm,
    load_sft_data,
    sft_loss,
    step_batches,
)

_SMOOTHING = 0.8


async def run_warmup(run_dir: Path, redis_url: str | None) -> int:
    """Train the built model and write it where RL starts from; return 0.

    It ends itself where it gets no further.
    """
    die_with_parent()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    context = open_context(run_dir, redis_url)
    async with await connect_to_run(context.redis_url, context.namespace) as bus:
        with ProgressWatch("warmup", context.recipe.launch.stall_s) as watch:
            watch.at("reading its data and model (launch.stall_s)")
            for step, report in warm_up(context):
                watch.rest()  # waiting for Redis has a deadline of its own
                values = {"loss": report.loss, "train_s": report.seconds}
                record = MetricRecord(time.time(), "warmup", "warmup", step, values)
                await bus.send_metrics([record])
                watch.at("a step, or writing the model (launch.stall_s),")
    return 0


def warm_up(context: RunContext) -> Iterator[tuple[int, StepReport]]:
    """Train the built model on the run's rows, and write it where RL starts from.

    Yields:
        Each step's number and report.
    """
    config, held = context.recipe.warmup, context.recipe.model.training
    mesh = build_mesh(ParallelConfig())
    # whole weights are warmed up by this one process, also where adapters are trained later
    plain = replace(held, lora=None, compute_dtype=held.dtype)
    model = load_causal_lm(context.files.built_model, mesh, plain)
    learner = Learner(model, config.learner, mesh=mesh)
    data = _rows_as_examples(context)
    batches = SftBatchConfig(
        batch_size=config.batch_size,
        max_tokens=context.recipe.trainer.tokens_per_batch,
        layout="packed",
        bucket=1,
        seed=context.recipe.seed,
    )
    smoothed: float | None = None
    for step in range(config.steps):
        report = learner.step(step_batches(data, batches, step), sft_loss, filler=empty_batch())
        yield step, report
        smoothed = (
            report.loss
            if smoothed is None
            else _SMOOTHING * smoothed + (1 - _SMOOTHING) * report.loss
        )
        if smoothed < config.stop_at_loss:
            break
    export_hf(model, context.files.model, mesh, tokenizer_dir=context.files.built_model)


def _rows_as_examples(context: RunContext) -> SftData:
    """Read the training rows as examples: the response is ``response``, or else ``answer``."""
    from transformers import AutoTokenizer

    path = context.files.train.with_name("warmup.jsonl")
    with context.files.train.open(encoding="utf-8") as rows, path.open("w") as examples:
        for line in rows:
            examples.write(json.dumps(_as_example(json.loads(line))) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(context.files.built_model)
    return load_sft_data(path, tokenizer)


def _as_example(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if "messages" in row:
        return row
    response = row.get("response", row.get("answer"))
    if response is None:
        raise DataError(
            f"the row with the prompt {row['prompt']!r:.60} has neither 'response' nor 'answer', "
            "which a freshly built model is warmed up on: add one, or set warmup.steps=0"
        )
    return {"prompt": row["prompt"], "response": response}
