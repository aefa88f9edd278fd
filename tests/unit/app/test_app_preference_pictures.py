"""Preferences about pictures: every loss trains, and its batches are those of rows alone."""

import json
from pathlib import Path

import pytest
import torch
from seeing import COLOURS, write_pictures, write_seeing_model

from cosmos_algos import DpoConfig, KtoConfig, RewardModelConfig
from cosmos_app.given.divided import Divided
from cosmos_app.given.preference_data import Encoder, PreferenceFormat, load_marked, load_pairs
from cosmos_app.given.preferences import KtoTask, Layout, PairTask
from cosmos_app.given.reward_model import RewardTask
from cosmos_parallel import (
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    PictureReader,
    SftBatchConfig,
    SftDataError,
    build_mesh,
    load_causal_lm,
)

VISION = "model.visual.patch_embed.proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_seeing_model(folder / "model")
    write_pictures(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return Encoder(tokenizer=tokenizer, reader=PictureReader.of(folder / "model"))


def rows(folder: Path) -> Path:
    """Of a picture of each colour, by each way of writing them, and of a text."""
    red, green, blue = (f"{colour}-28x28.png" for colour in COLOURS)
    asked = [{"role": "user", "content": [{"type": "image", "image": green}, {"text": "?"}]}]
    said = {"chosen": "yes", "rejected": "no"}
    turns = {name: [{"role": "assistant", "content": text}] for name, text in said.items()}
    found = [
        {"prompt": "Red?", "images": [red], **said},
        {"prompt": asked, **turns},
        {"prompt": "Blue?", "images": blue, **turns},
        {"prompt": "Blue?", "image": blue, **turns},
        {"prompt": "A text?", **said},
    ]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, found)))
    return path


def marked_rows(folder: Path) -> Path:
    found = [
        {"prompt": "Red?", "images": [f"{colour}-56x28.png"], "response": "yes", "label": is_right}
        for colour, is_right in (("red", True), ("blue", False))
    ]
    found.append({"prompt": "A text?", "response": "yes", "label": True})
    path = folder / "marked.jsonl"
    path.write_text("\n".join(map(json.dumps, found)))
    return path


def load(folder: Path, **changes):
    mesh = build_mesh(ParallelConfig())
    return load_causal_lm(folder / "model", mesh, ModelConfig(dtype="float32", **changes))


def layout(encoder: Encoder, max_tokens: int) -> Layout:
    return Layout(
        batch=SftBatchConfig(batch_size=4, max_tokens=max_tokens),
        vocab_size=len(encoder.tokenizer),
        pictures=encoder.reader,
    )


def test_pictures_are_named_in_any_way_and_belong_to_both_answers(
    folder: Path, encoder: Encoder
) -> None:
    pairs = load_pairs(rows(folder), encoder, PreferenceFormat())
    assert [[len(one.images) for one in pair] for pair in pairs] == [[1, 1]] * 4 + [[0, 0]]
    (mark,) = encoder.reader.image_token_ids if encoder.reader else (0,)
    for better, worse in pairs:
        assert (better.token_ids == mark).sum() == len(better.images)
        judged = encoder.tokenizer.decode(better.token_ids[better.trainable])
        assert judged.startswith("yes")
        assert encoder.tokenizer.decode(worse.token_ids[worse.trainable]).startswith("no")


def test_a_model_that_sees_nothing_is_not_shown_pictures(folder: Path, encoder: Encoder) -> None:
    blind = Encoder(tokenizer=encoder.tokenizer)
    with pytest.raises(SftDataError, match="has 1 pictures or videos, and the model sees none"):
        load_pairs(rows(folder), blind, PreferenceFormat())


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model"])
def test_every_loss_trains_on_pictures_and_has_the_loss_of_rows_alone(
    folder: Path, encoder: Encoder, kind: str
) -> None:
    reports = []
    for max_tokens in (1, 1000):
        plan = layout(encoder, max_tokens)
        model = load(folder, value_head=kind == "reward_model")
        reference = load(folder).requires_grad_(False)
        if kind == "kto":
            marked = load_marked(marked_rows(folder), encoder, PreferenceFormat())
            task = KtoTask(Divided.of(marked, marked), reference, KtoConfig(), plan)
        else:
            pairs = load_pairs(rows(folder), encoder, PreferenceFormat())
            task = (
                PairTask(Divided.of(pairs, pairs), reference, DpoConfig(), plan)
                if kind == "dpo"
                else RewardTask(Divided.of(pairs, pairs), RewardModelConfig(), plan)
            )
        learner = Learner(model, LearnerConfig())
        for step in range(2):
            task.prepare(learner, step)
            batches = task.batches(step, rank=0, size=1)
            report = learner.step(batches, task.loss, filler=task.filler, scorers=task.scorers)
            reports.append((report.loss, report.grad_norm))
        held_out = task.held_out(rank=0, size=1)[""]
        assert learner.evaluate(held_out, task.loss, scorers=task.scorers).loss > 0
        nothing = learner.evaluate([task.filler], task.loss, scorers=task.scorers)
        assert nothing.weight == 0
        eyes = (model.get_parameter(VISION), reference.get_parameter(VISION))
        assert not torch.equal(*eyes)
    alone, together = reports[:2], reports[2:]
    for one, other in zip(alone, together, strict=True):
        assert one == pytest.approx(other, rel=2e-4)
    assert torch.isfinite(torch.tensor(reports)).all()
