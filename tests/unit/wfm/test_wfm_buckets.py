"""Pictures of several shapes in one run: which size each gets, and that batches stay exact."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from cosmos_wfm import (
    DiffusionSftConfig,
    FullTuning,
    ImageCaptionsConfig,
    SampleEncoder,
    WfmConfigError,
    train_sft,
)
from cosmos_wfm.captions import size_of
from cosmos_wfm.sft import step_batches

BUCKETS = ((16, 32), (16, 16), (32, 16))


class OneRank:
    data_rank, data_size = 0, 1


@pytest.fixture
def recipe(model_dir, tmp_path):
    (tmp_path / "data").mkdir()
    for number, size in enumerate([(40, 20), (20, 20), (20, 40), (60, 20), (22, 20)]):  # (w, h)
        Image.new("RGB", size, (50 * number, 0, 0)).save(tmp_path / "data" / f"{number}.png")
        (tmp_path / "data" / f"{number}.json").write_text(f'{{"prompt": "{number}"}}')
    return DiffusionSftConfig(
        model=str(model_dir),
        data=ImageCaptionsConfig(path=str(tmp_path / "data"), buckets=BUCKETS),
        output=str(tmp_path / "out"),
        num_steps=2,
        batch_size=5,
        micro_batch_size=2,
        tuning=FullTuning(),
    )


@pytest.mark.parametrize(
    ("width", "height", "bucket"),
    [
        (2, 1, (16, 32)),
        (1, 9, (32, 16)),
        (140, 100, (16, 16)),  # log 1.4 is nearer to log 1 than to log 2
        (142, 100, (16, 32)),  # log 1.42 is not
    ],
)
def test_the_bucket_is_the_nearest_in_shape(recipe, width, height, bucket):
    image = Image.new("RGB", (width, height))

    assert size_of(image, recipe.data) == bucket
    assert size_of(image, replace(recipe.data, buckets=(), height=8, width=4)) == (8, 4)


def test_micro_batches_are_of_one_size_and_have_every_sample_once(recipe, adapter):
    data = recipe.data.build()
    assert [tuple(s.pixels.shape[1:]) for s in data] == [
        (16, 32), (16, 16), (32, 16), (16, 32), (16, 16),
    ]  # fmt: skip
    batches = step_batches(recipe, SampleEncoder(adapter, data), 0, mesh=OneRank())

    assert sorted(tuple(batch.latents.shape) for batch in batches) == [
        (1, 4, 16, 8), (2, 4, 8, 8), (2, 4, 8, 16),
    ]  # fmt: skip
    assert sum(float(batch.weights.sum()) for batch in batches) == 5.0


def test_losses_do_not_depend_on_how_samples_are_grouped(recipe):
    found = {}
    for size in (1, 5):
        run = replace(recipe, micro_batch_size=size, output=f"{recipe.output}{size}")
        found[size] = []
        train_sft(run, on_step=lambda step, report, figures, to=found[size]: to.append(report.loss))

    assert found[1] == pytest.approx(found[5], abs=1e-5)
    assert torch.tensor(found[1]).isfinite().all()


def test_a_bucket_that_does_not_fit_the_model_is_refused(recipe):
    data = replace(recipe.data, buckets=((16, 16), (16, 18)))

    with pytest.raises(WfmConfigError, match="16x18 pixels, but this model needs multiples of 4"):
        train_sft(replace(recipe, data=data))
