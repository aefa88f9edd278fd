"""Ranks that divide models between them, take an optimizer's step and export what they hold.

python export_ranks.py DIRECTORY < cases, as for ``parallel_pool.py``; a case has degrees and the
families that are trained under them. Each family leaves its export in DIRECTORY/FAMILY/exported,
and what transformers says of it in DIRECTORY/FAMILY/said.pt.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from export_families import PICTURE, PROMPT, SPELT, write_original
from parallel_pool import SHAPES, loss, micro_batches, run_pool
from transformers import AutoConfig, AutoTokenizer

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    LossFunction,
    ModelConfig,
    ParallelConfig,
    PictureReader,
    ProcessContext,
    SftBatchConfig,
    TrainingMesh,
    build_mesh,
    empty_batch,
    export_hf,
    lay_out,
    load_causal_lm,
    load_sft_data,
    sft_loss,
)
from cosmos_parallel.generic_weights import auto_class

LEARNING = LearnerConfig(optimizer=AdamWConfig(lr=1e-2))
# with fewer the router of Qwen3.5's mixture has a token between two experts, which vLLM's bfloat16
# sends to the other
BATCHES = (*SHAPES, *SHAPES[1:])


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a family learns in its step, and what it is asked then."""

    loss: LossFunction[Any]
    batches: list[Any]
    filler: Any
    asked: list[dict[str, torch.Tensor]]
    prompts: list[dict[str, Any]]


def lesson_of(original: Path) -> Lesson:
    """Return random tokens, and for a model that was given pictures rows with them."""
    reader = PictureReader.of(original)
    if reader is None:
        asked = {"input_ids": torch.tensor([PROMPT])}
        batches = micro_batches(0, packed=False, shapes=BATCHES)
        return Lesson(loss, batches, batches[0], [asked], [{"tokens": PROMPT}])
    tokenizer = AutoTokenizer.from_pretrained(original)
    data = load_sft_data(original / "rows.jsonl", tokenizer, reader=reader)
    batching = SftBatchConfig(bucket=1)
    batches = [lay_out([row], batching, reader=reader)[0] for row in data.examples]
    prompts = [
        {"tokens": tokenizer.encode(text, add_special_tokens=False), "images": images}
        for text, images in ((SPELT, [str(original / PICTURE)]), (SPELT.partition(" ")[2], []))
    ]
    asked = []
    for prompt in prompts:
        tokens = torch.tensor([reader.expand(prompt["tokens"], prompt["images"])])
        inputs = reader.inputs(tokens, [prompt["images"]]) if prompt["images"] else {}
        asked.append({"input_ids": tokens, **inputs})
    return Lesson(sft_loss, batches, empty_batch(reader), asked, prompts)


@torch.no_grad()
def say(folder: Path, asked: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the log-probs [T, V] that transformers' own model of a folder gives of prompts."""
    config = AutoConfig.from_pretrained(folder)
    # its default attention drops the bound that Gemma 2 has for scores
    attention = "eager" if config.model_type == "gemma2" else None
    model, problems = auto_class(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    assert not any(problems.values()), problems
    return [model.eval()(**inputs).logits[0].log_softmax(-1) for inputs in asked]


def teach(folder: Path, mesh: TrainingMesh) -> list[float]:
    """Take one step and export; return the loss then, and on the first rank transformers' own."""
    original, lesson = folder / "original", lesson_of(folder / "original")
    held = ModelConfig(**json.loads((folder / "held.json").read_text()))
    model = load_causal_lm(original, mesh, held)
    learner = Learner(model, LEARNING, mesh=mesh)
    mine = lesson.batches[mesh.data_rank :: mesh.data_size]
    assert learner.step(mine, lesson.loss, filler=lesson.filler).outcome == "updated"
    tokenizer_dir = original if (original / "tokenizer.json").exists() else None
    export_hf(model, folder / "exported", mesh, tokenizer_dir=tokenizer_dir)
    text = lesson.asked[-1]["input_ids"]
    whole = {
        "tokens": text,
        "kept": torch.ones_like(text, dtype=torch.bool),
        "positions": torch.arange(text.shape[1])[None],
    }
    found = learner.evaluate([whole] if mesh.data_rank == 0 else [], loss, filler=whole).loss
    if mesh.process.rank > 0:
        return [found]
    before, said = (say(each, lesson.asked) for each in (original, folder / "exported"))
    torch.save({"before": before, "after": said, "prompts": lesson.prompts}, folder / "said.pt")
    rows = torch.arange(text.shape[1] - 1)
    return [found, -float(said[-1][rows, text[0, 1:]].mean())]


def train(case: dict[str, Any], directory: Path, process: ProcessContext) -> object:
    """Teach every family of a case; write what they start from if it says nothing of degrees."""
    if "degrees" not in case:
        for family in case["families"]:
            write_original(family, directory / family)
        return None
    mesh = build_mesh(ParallelConfig(**case["degrees"]), process)
    return {family: teach(directory / family, mesh) for family in case["families"]}


if __name__ == "__main__":
    run_pool(train)
