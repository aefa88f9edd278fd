"""What every arm of the RL benchmark starts from: a task, and one warmed tiny model on disk.

Made once and found again: arms differ in the system that trains, never in data or weights.
"""

import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cosmos_app.quickstart.arithmetic import write_rows
from cosmos_app.quickstart.tiny_model import build_tiny_model
from cosmos_app.recipe import Recipe, WarmupConfig

IGNORED = -100
SMOOTHING = 0.8
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
    "sums": Task(recipe=CONFIGS / "quickstart.toml", targets=(0.3, 0.4, 0.5), trl_micro_batch=512),
    "chains": Task(recipe=CONFIGS / "chains.toml", targets=(0.18, 0.2, 0.25), trl_micro_batch=64),
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


def _sft_batch(tokenizer: Any, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels int64[B, T], right-padded; only the answer and its end are labels."""
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [
        [*tokenizer(row["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for row in rows
    ]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(rows), longest), int(tokenizer.pad_token_id))
    labels = torch.full_like(ids, IGNORED)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.tensor(prompt + answer)
        labels[index, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def _warm(workload: Workload, source: Path, warmup: WarmupConfig) -> PreTrainedModel:
    """Fine-tune the model at ``source`` as the recipe's warm-up does; save it."""
    rows = read_rows(workload.train)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = warmup.learner.optimizer
    optimizer = config.build(dict(model.named_parameters()))
    order = random.Random(0)
    smoothed = float("inf")
    for step in range(warmup.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * config.schedule.factor(step)
        ids, labels = _sft_batch(tokenizer, order.sample(rows, min(warmup.batch_size, len(rows))))
        logits = model(ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), warmup.learner.max_grad_norm)
        optimizer.step()
        before = smoothed if step else loss.item()
        smoothed = SMOOTHING * before + (1 - SMOOTHING) * loss.item()
        if smoothed < warmup.stop_at_loss:
            break
    model.save_pretrained(workload.model)
    tokenizer.save_pretrained(workload.model)
    return model


def prepare_workload(directory: Path, recipe: Recipe) -> Workload:
    """Make the recipe's data and its model in ``directory``, warmed; or find them there.

    Raises:
        ValueError: if ``directory`` holds the workload of other settings.
    """
    settings = repr((recipe.model.tiny, recipe.data, recipe.warmup, recipe.seed))
    wanted = Workload(
        train=directory / "train.jsonl",
        held_out=directory / "held_out.jsonl",
        model=directory / "warm",
        accuracy=float("nan"),
    )
    facts = directory / "workload.json"
    if facts.exists():
        found = json.loads(facts.read_text())
        if found["settings"] != settings:
            raise ValueError(f"{directory}: made for {found['settings']}; remove it")
        return replace(wanted, accuracy=found["accuracy"])
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    started = time.monotonic()
    train, held_out = recipe.data.generate(recipe.seed)
    write_rows(wanted.train, train)
    write_rows(wanted.held_out, held_out)
    texts = [json.dumps(row) for row in train + held_out]
    parameters = build_tiny_model(directory / "built", texts, recipe.model.tiny, recipe.seed)
    accuracy = greedy_accuracy(
        _warm(wanted, directory / "built", recipe.warmup),
        AutoTokenizer.from_pretrained(wanted.model),
        held_out,
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
