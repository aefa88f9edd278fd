"""What every arm of the RL benchmark starts from: a task, and one warmed tiny model on disk.

Made once and found again: arms differ in the system that trains, never in data or weights.
"""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from cosmos_app.prepare import prepare_model, run_files
from cosmos_app.prepared_data import prepare_data
from cosmos_app.recipe import Recipe
from cosmos_app.roles.process import RunContext
from cosmos_app.roles.warmup import warm_up
from cosmos_core.rundir import RunDirectory

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

Row = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is learned.

    Attributes:
        recipe: how, and on what rows.
        targets: rewards whose times are compared.
        trl_micro_batch: samples that TRL trains on at once; of several tried, the fastest.
    """

    recipe: Path
    targets: tuple[float, ...]
    trl_micro_batch: int


TASKS: Mapping[str, Task] = {
    "digits": Task(
        recipe=CONFIGS / "quickstart.toml", targets=(0.3, 0.35, 0.4), trl_micro_batch=64
    ),
    "sums": Task(recipe=CONFIGS / "sums.toml", targets=(0.3, 0.4, 0.5), trl_micro_batch=512),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Where the common start of all arms lies.

    Attributes:
        train: JSON lines of {"prompt", "answer"} to train on.
        held_out: the same, never trained on.
        model: the warmed model, a Hugging Face directory.
        accuracy: its greedy accuracy on the held-out rows.
    """

    train: Path
    held_out: Path
    model: Path
    accuracy: float


def read_rows(path: Path) -> list[Row]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def greedy_accuracy(
    model: Any, tokenizer: Tokenizer, rows: list[Row], max_new_tokens: int
) -> float:
    """Return the share of rows whose greedy answer is exactly right; one batch, left-padded."""
    was_training = model.training
    model.eval()
    encoded = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left")
    ids = torch.tensor(encoded["input_ids"])
    mask = torch.tensor(encoded["attention_mask"])
    output = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens
    )
    model.train(was_training)
    texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def _make(directory: Path, recipe: Recipe) -> int:
    """Make a run's data and its model, warmed up as the app does it; return the model's size."""
    with RunDirectory.create(directory, config_json="{}", now_s=time.time()) as run:
        files = run_files(recipe, run.path)
        prepare_data(recipe, files)
        parameters = prepare_model(recipe, files)
        context = RunContext(run=run, recipe=recipe, files=files, redis_url="", namespace="")
        for _ in warm_up(context):
            pass
    return parameters


def prepare_workload(directory: Path, recipe: Recipe) -> Workload:
    """Make the recipe's data and its model in ``directory``, warmed; or find them there.

    Raises:
        ValueError: if ``directory`` holds the workload of other settings.
    """
    settings = repr((recipe.model, recipe.data, recipe.warmup, recipe.seed))
    files = run_files(recipe, directory)
    wanted = Workload(
        train=files.train, held_out=files.held_out, model=files.model, accuracy=float("nan")
    )
    facts = directory / "workload.json"
    if facts.exists():
        found = json.loads(facts.read_text())
        if found["settings"] != settings:
            raise ValueError(f"{directory}: made for {found['settings']}; remove it")
        return replace(wanted, accuracy=found["accuracy"])
    shutil.rmtree(directory, ignore_errors=True)
    torch.set_num_threads(1)
    started = time.monotonic()
    parameters = _make(directory, recipe)
    accuracy = greedy_accuracy(
        AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32),
        AutoTokenizer.from_pretrained(wanted.model),
        read_rows(wanted.held_out),
        recipe.rollout.sampling.max_new_tokens,
    )
    facts.write_text(
        json.dumps({"accuracy": accuracy, "parameters": parameters, "settings": settings})
    )
    print(
        f"workload: {parameters:,} parameters, accuracy {accuracy:.3f} after "
        f"{time.monotonic() - started:.0f} s of warm-up, in {directory}"
    )
    return replace(wanted, accuracy=accuracy)
