"""Trains on pairs, marked samples and a teacher's distributions over videos; for `video_rows`."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from cosmos_algos import DistillationConfig, DpoConfig, KtoConfig, RewardModelConfig
from cosmos_app.given.distillation import DistillationTask
from cosmos_app.given.divided import Divided
from cosmos_app.given.preference_data import Encoder, PreferenceFormat, load_marked, load_pairs
from cosmos_app.given.preferences import KtoTask, Layout, PairTask
from cosmos_app.given.reward_model import RewardTask
from cosmos_app.given.supervised import SftTask
from cosmos_app.given.task import Task
from cosmos_core.videos import VideoSampling
from cosmos_parallel import (
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    PictureReader,
    SftBatchConfig,
    SftFormat,
    build_mesh,
    load_causal_lm,
    load_sft_data,
)

VISION = "model.visual.patch_embed.proj.weight"
KINDS = ("dpo", "kto", "reward_model", "distillation")
PLAIN, ODD, RED = "v/plain.mp4", "v/odd.mp4", "p/red-28x28.png"
ASKED = [{"role": "user", "content": [{"type": "video", "video": PLAIN, "fps": 1}, {"text": "?"}]}]
SAID = {"chosen": "yes", "rejected": "no"}
TURNS = {name: [{"role": "assistant", "content": text}] for name, text in SAID.items()}
PAIRS = [
    {"prompt": "What?", "videos": [PLAIN], **SAID},
    {"prompt": ASKED, **TURNS},
    {"prompt": "Both?", "videos": ODD, "images": RED, **SAID},
    {"prompt": "A text?", **SAID},
]
MARKED = [
    {"prompt": "What?", "videos": [PLAIN], "response": "yes", "label": True},
    {"prompt": "What?", "videos": [ODD], "response": "yes", "label": False},
    {"prompt": "A text?", "response": "yes", "label": True},
]
GIVEN = [
    {"prompt": "What?", "videos": [PLAIN], "response": "yes"},
    {"prompt": "Both?", "videos": ODD, "images": RED, "response": "no"},
    {"prompt": "A text?", "response": "yes"},
]


class Tasks:
    """Every task on given data, over the same videos."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "model"
        self._encoder = Encoder(
            tokenizer=AutoTokenizer.from_pretrained(self._path),
            reader=PictureReader.of(self._path),
        )
        self._mesh = build_mesh(ParallelConfig())

    def reports(self, kind: str, max_tokens: int) -> dict:
        """Return losses and gradient norms of two steps, and whether the part that sees moved."""
        model = self._load(value_head=kind == "reward_model")
        before = model.get_parameter(VISION).detach().clone()
        task = self._task(kind, SftBatchConfig(batch_size=4, max_tokens=max_tokens))
        learner = Learner(model, LearnerConfig())
        steps = []
        for step in range(2):
            task.prepare(learner, step)
            batches = task.batches(step, rank=0, size=1)
            report = learner.step(batches, task.loss, filler=task.filler, scorers=task.scorers)
            steps.append((report.loss, report.grad_norm))
        moved = not model.get_parameter(VISION).equal(before)
        return {"steps": steps, "batches": len(batches), "sees": moved}

    def _task(self, kind: str, batch: SftBatchConfig) -> Task:
        tokenizer, reader = self._encoder.tokenizer, self._encoder.reader
        if kind == "distillation":
            path = self._written(GIVEN)
            form = SftFormat(video_sampling=VideoSampling(max_frames=4))
            examples = load_sft_data(path, tokenizer, form, reader).examples
            teacher = self._frozen()
            for weight in teacher.parameters():
                weight.mul_(1.1)
            return DistillationTask(
                SftTask(Divided.of(examples, examples), batch, reader),
                teacher,
                DistillationConfig(),
            )
        plan = Layout(batch=batch, vocab_size=len(tokenizer), pictures=reader)
        rows = PreferenceFormat(video_sampling=VideoSampling(max_frames=4))
        if kind == "kto":
            data = load_marked(self._written(MARKED), self._encoder, rows)
            return KtoTask(Divided.of(data, data), self._frozen(), KtoConfig(), plan)
        pairs = load_pairs(self._written(PAIRS), self._encoder, rows)
        if kind == "dpo":
            return PairTask(Divided.of(pairs, pairs), self._frozen(), DpoConfig(), plan)
        return RewardTask(Divided.of(pairs, pairs), RewardModelConfig(), plan)

    def _load(self, **changes: bool):
        return load_causal_lm(self._path, self._mesh, ModelConfig(dtype="float32", **changes))

    def _frozen(self):
        return self._load().requires_grad_(False)

    def _written(self, rows: list[dict]) -> Path:
        path = self._directory / "task.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path


def reports(directory: Path) -> dict:
    """Return what `Tasks.reports` finds of every kind, a row in a batch and all in one."""
    tasks = Tasks(directory)
    return {kind: [tasks.reports(kind, size) for size in (1, 1000)] for kind in KINDS}
