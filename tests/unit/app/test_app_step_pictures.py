"""Samples with pictures as batches: whatever the layout, the scores of a pass over each alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from seeing import write_pictures, write_seeing_model

from cosmos_algos import (
    AggregationConfig,
    DrGrpoConfig,
    model_scores,
    policy_loss,
    sample_weights,
)
from cosmos_app.step_share import BatchPlan, Layout, StepShare, batches_of_share
from cosmos_core.trajectory import UNSAMPLED, Trajectory, VersionSpan
from cosmos_parallel import PictureError, PictureReader, use_packed_attention

CONFIG = DrGrpoConfig(aggregation=AggregationConfig())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_seeing_model(folder / "model")
    write_pictures(folder)
    return folder


@pytest.fixture(scope="module")
def reader(folder: Path) -> PictureReader:
    reader = PictureReader.of(folder / "model")
    assert reader is not None
    return reader


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model")
    assert use_packed_attention(model)
    return model.float()


def sample(reader: PictureReader, images: list[str], answer: str) -> Trajectory:
    """One mark in front for each picture, then letters, of which the answer's are trained."""
    prompt = reader.expand([1, *([3, reader.mark_id, 4] * len(images)), 70, 71], images)
    tokens = np.array([*prompt, *(ord(letter) - 24 for letter in answer)], np.int32)
    trained = np.arange(len(tokens)) >= len(prompt)
    spans = (VersionSpan(UNSAMPLED, len(prompt)), VersionSpan(2, len(answer)))
    return Trajectory(
        prompt_id="p",
        group="train.0.1",
        sibling=0,
        attempt=0,
        token_ids=tokens,
        logprobs=np.where(trained, -4.0, 0.0).astype(np.float32),
        trainable=trained,
        versions=spans,
        rewards={},
        reward=0.0,
        finish_reason="stop",
        images=tuple(images),
    )


def share_of(samples: list[Trajectory]) -> StepShare:
    lengths = [sample.num_trainable for sample in samples]
    return StepShare(
        refs=(),
        advantages=torch.linspace(-1.0, 1.0, len(samples), dtype=torch.float64),
        weights=sample_weights(lengths, list(range(len(samples))), AggregationConfig()),
    )


def gradients(
    model: transformers.PreTrainedModel, samples: list[Trajectory], plan: BatchPlan
) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    """Return the gradients of a step's loss, the scores of all trained tokens, and its passes."""
    model.zero_grad()
    batches = batches_of_share(share_of(samples), samples, plan, policy_version=3)
    scores: list[torch.Tensor] = []
    for batch in batches:
        assert plan.pictures is None or batch.image_inputs is not None
        policy_loss(CONFIG)(model, batch).total.backward()
        with torch.no_grad():
            scores.append(model_scores(model, batch).logprobs[batch.trainable])
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found, torch.cat(scores).sort().values, len(batches)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_batches_with_pictures_have_the_gradient_of_samples_alone(
    folder: Path, reader: PictureReader, model: transformers.PreTrainedModel, layout: Layout
) -> None:
    red, wide = (str(folder / name) for name in ("red-28x28.png", "blue-56x28.png"))
    samples = [
        sample(reader, [red], "red"),
        sample(reader, [], "no picture"),
        sample(reader, [wide, red], "two"),
    ]
    alone = BatchPlan(layout="padded", max_tokens=1, pictures=reader)
    together = BatchPlan(layout=layout, max_tokens=1000, pictures=reader)
    expected, likely, passes = gradients(model, samples, alone)
    found, scores, joined = gradients(model, samples, together)
    assert (passes, joined) == (3, 1)
    torch.testing.assert_close(scores, likely, rtol=1e-5, atol=1e-6)
    assert expected.keys() == found.keys() == dict(model.named_parameters()).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=1e-6, msg=name)
    vision = [gradient for name, gradient in found.items() if "visual" in name]
    assert sum(gradient.abs().sum() for gradient in vision) > 0


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_share_without_pictures_or_samples_enters_the_vision_part_with_weight_0(
    reader: PictureReader, model: transformers.PreTrainedModel, layout: Layout
) -> None:
    plan = BatchPlan(layout=layout, max_tokens=1000, pictures=reader)
    text = [sample(reader, [], "text"), sample(reader, [], "words")]
    without = replace(plan, pictures=None)
    plain, likely, _ = gradients(model, text, without)
    found, scores, _ = gradients(model, text, plan)
    torch.testing.assert_close(scores, likely, rtol=1e-5, atol=1e-6)
    assert {name for name in found if name not in plain} == {n for n in found if "visual" in n}
    assert all(not found[name].any() for name in found if "visual" in name)
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=1e-6, msg=name)
    nothing, _, passes = gradients(model, [], plan)
    assert passes == 1
    assert nothing.keys() == found.keys()
    assert all(not gradient.any() for gradient in nothing.values())


def test_a_sample_whose_tokens_are_not_those_of_its_picture_is_refused_by_name(
    folder: Path, reader: PictureReader
) -> None:
    good = sample(reader, [str(folder / "red-28x28.png")], "red")
    plan = BatchPlan(layout="padded", max_tokens=1000, pictures=reader)
    for images, words in (
        ((str(folder / "red-56x56.png"),), r"group train.0.1 sibling 0.* 1 tokens .* take 4"),
        ((str(folder / "gone.png"),), r"group train.0.1 sibling 0: .*gone.png: No such file"),
    ):
        wrong = [replace(good, images=images)]
        with pytest.raises(PictureError, match=words):
            batches_of_share(share_of(wrong), wrong, plan, policy_version=3)
