"""What every arm of the RL benchmark starts from: the sums, and one warmed tiny model on disk.

Made once and found again: arms differ in the system that trains, never in data or weights.
"""

import json
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from cosmos_app.quickstart.arithmetic import arithmetic_rows, write_rows
from cosmos_app.quickstart.tiny_model import build_tiny_model
from cosmos_app.recipe import Recipe

IGNORED = -100
WARM_LR = 2e-3
WARM_RAMP = 20
WARM_MOST_STEPS = 400
LOOK_EVERY = 5
LONGEST_ANSWER = 8

Row = dict[str, str]


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
def greedy_accuracy(model: PreTrainedModel, tokenizer: Tokenizer, rows: list[Row]) -> float:
    """Return the share of rows whose greedy answer is exactly right; one batch, left-padded."""
    was_training = model.training
    model.eval()
    encoded = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left")
    ids = torch.tensor(encoded["input_ids"])
    mask = torch.tensor(encoded["attention_mask"])
    output = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=LONGEST_ANSWER
    )
    model.train(was_training)
    texts = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def _sft_batch(tokenizer: Tokenizer, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
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


def _warm(workload: Workload, source: Path, batch_size: int) -> float:
    """Fine-tune the model at ``source`` until it reaches the workload's accuracy; save it."""
    rows, held_out = read_rows(workload.train), read_rows(workload.held_out)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR, betas=(0.9, 0.95))
    order = random.Random(0)
    accuracy = 0.0
    for step in range(WARM_MOST_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = WARM_LR * min(1.0, (step + 1) / WARM_RAMP)
        ids, labels = _sft_batch(tokenizer, order.sample(rows, min(batch_size, len(rows))))
        logits = model(ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % LOOK_EVERY == LOOK_EVERY - 1:
            accuracy = greedy_accuracy(model, tokenizer, held_out)
            if accuracy >= workload.accuracy:
                break
    model.save_pretrained(workload.model)
    tokenizer.save_pretrained(workload.model)
    return accuracy


def prepare_workload(directory: Path, recipe: Recipe, *, aim: float = 0.2) -> Workload:
    """Make the recipe's data and model in ``directory``, warmed to ``aim``; or find them there.

    Raises:
        ValueError: if ``directory`` holds the workload of other settings.
    """
    settings = repr((recipe.model.tiny, recipe.data.arithmetic, recipe.seed, aim))
    wanted = Workload(
        train=directory / "train.jsonl",
        held_out=directory / "held_out.jsonl",
        model=directory / "warm",
        accuracy=aim,
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
    train, held_out = arithmetic_rows(recipe.data.arithmetic, recipe.seed)
    write_rows(wanted.train, train)
    write_rows(wanted.held_out, held_out)
    texts = [json.dumps(row) for row in train + held_out]
    parameters = build_tiny_model(directory / "built", texts, recipe.model.tiny, recipe.seed)
    accuracy = _warm(wanted, directory / "built", recipe.warmup.batch_size)
    facts.write_text(
        json.dumps({"accuracy": accuracy, "parameters": parameters, "settings": settings})
    )
    print(
        f"workload: {parameters:,} parameters, accuracy {accuracy:.3f} after "
        f"{time.monotonic() - started:.0f} s of warm-up, in {directory}"
    )
    return replace(wanted, accuracy=accuracy)
