"""Fine-tuning a tiny SD3: the loss falls, and plain diffusers loads what was trained."""

import os
from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from full_disks import no_file_longer_than

from cosmos_parallel import AdamWConfig, LearnerConfig, ParallelConfig, ScheduleConfig
from cosmos_wfm import (
    DiffusionSftConfig,
    FullTuning,
    ImageCaptionsConfig,
    LoraTuning,
    SaveError,
    WfmConfigError,
    load_adapter,
    save_pipeline,
    tiny_sd3_pipeline,
    train_sft,
)
from cosmos_wfm.caption_data import sample_index
from cosmos_wfm.encoding import SampleEncoder
from cosmos_wfm.sft import step_batches


@pytest.fixture
def recipe(model_dir, data_dir, tmp_path):
    return DiffusionSftConfig(
        model=str(model_dir),
        data=ImageCaptionsConfig(path=str(data_dir), height=16, width=16),
        output=str(tmp_path / "out"),
        num_steps=15,
        batch_size=3,
        micro_batch_size=3,
        tuning=FullTuning(),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=3e-3)),
    )


def trained(recipe):
    reports = []
    directory = train_sft(recipe, on_step=lambda step, report, figures: reports.append(report))
    return directory, [report.loss for report in reports]


def velocity(transformer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return transformer.eval()(
            hidden_states=torch.randn(2, 4, 8, 8, generator=generator),
            encoder_hidden_states=torch.randn(2, 9, 64, generator=generator),
            pooled_projections=torch.randn(2, 64, generator=generator),
            timestep=torch.tensor([100.0, 900.0]),
        ).sample


def image(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        "a red square",
        num_inference_steps=2,
        height=16,
        width=16,
        output_type="np",
        generator=torch.Generator().manual_seed(0),
    ).images


def test_full_tuning_learns_and_reloads(recipe, model_dir):
    directory, losses = trained(recipe)

    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    assert directory.name == "step_15"
    reloaded = DiffusionPipeline.from_pretrained(directory)
    assert isinstance(reloaded, StableDiffusion3Pipeline)
    before = load_adapter(model_dir)
    moved = velocity(reloaded.transformer) - velocity(before.transformer)
    assert moved.abs().max() > 0.01
    assert image(reloaded).shape == (1, 16, 16, 3)
    for name in ("vae", "text_encoder", "text_encoder_3"):
        frozen = before.pipeline.components[name].state_dict()
        saved = reloaded.components[name].state_dict()
        assert all(torch.equal(saved[key], frozen[key]) for key in frozen)


def test_lora_reloads_with_its_alpha_and_gives_the_trained_output(recipe, model_dir):
    seen = {}

    class Watched(LoraTuning):
        def save(self, adapter, directory, *, writes):
            super().save(adapter, directory, writes=writes)
            seen["output"] = velocity(adapter.transformer)

    directory, losses = trained(replace(recipe, tuning=Watched(rank=4, alpha=12)))

    pipeline = DiffusionPipeline.from_pretrained(model_dir)
    base = velocity(pipeline.transformer)
    pipeline.load_lora_weights(
        directory / "lora", weight_name="model.safetensors", adapter_name="default"
    )
    assert torch.equal(velocity(pipeline.transformer), seen["output"])
    assert (seen["output"] - base).abs().max() > 1e-3
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize(
    "tuning", [FullTuning(), LoraTuning(rank=2, alpha=4)], ids=["full", "lora"]
)
def test_what_is_saved_is_for_whom_other_files_are(recipe, tuning, tmp_path):
    before = os.umask(0o027)
    try:
        directory, _ = trained(replace(recipe, num_steps=1, tuning=tuning))
        save_pipeline(tiny_sd3_pipeline(num_layers=1), tmp_path / "tiny")
    finally:
        os.umask(before)

    for root in (directory, tmp_path / "tiny"):
        files = [path for path in root.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} >= {".safetensors"}
        assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


@pytest.mark.parametrize(
    "tuning", [FullTuning(), LoraTuning(rank=2, alpha=4)], ids=["full", "lora"]
)
def test_a_save_to_a_full_disk_is_said_and_leaves_what_was_there(model_dir, tuning, tmp_path):
    adapter = load_adapter(model_dir)
    tuning.prepare(adapter, seed=0)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "before").touch()
    words = r"step_1 cannot be written: .*File too large"
    with no_file_longer_than(500), pytest.raises(SaveError, match=words):
        tuning.save(adapter, tmp_path / "step_1", writes=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["step_1", "before"]


@pytest.mark.parametrize("idle", [0, 1])
def test_a_schedule_that_ends_before_the_run_is_refused_where_it_ends_at_0(recipe, idle):
    schedule = ScheduleConfig(shape="cosine", num_steps=15 - idle)
    learner = LearnerConfig(optimizer=AdamWConfig(schedule=schedule))
    if not idle:
        assert replace(recipe, learner=learner).num_steps == 15
        return
    with pytest.raises(WfmConfigError, match=r"num_steps is 14, of 15 updates.*the last 1 would"):
        replace(recipe, learner=learner)


def test_micro_batches_give_the_losses_of_the_whole_batch(recipe):
    _, whole = trained(replace(recipe, num_steps=3))
    other = f"{recipe.output}-parts"
    _, parts = trained(replace(recipe, output=other, num_steps=3, micro_batch_size=1))

    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), atol=1e-5, rtol=0)


def test_a_sample_has_the_same_noise_in_whatever_rank_or_micro_batch(recipe, adapter):
    encoder = SampleEncoder(adapter, recipe.data.build())
    whole = step_batches(recipe, encoder, 4, mesh=Rank(0, 1))[0]
    parts = [
        step_batches(replace(recipe, micro_batch_size=1), encoder, 4, mesh=Rank(rank, 2))
        for rank in (0, 1)
    ]

    # Rank 0 of 2 has places 0 and 2, rank 1 has place 1.
    for place, part in enumerate([parts[0][0], parts[1][0], parts[0][1]]):
        assert torch.equal(part.noise[0], whole.noise[place])
        assert torch.equal(part.sigmas[0], whole.sigmas[place])


def test_a_rank_without_samples_gets_a_pass_of_weight_zero(recipe, adapter):
    encoder = SampleEncoder(adapter, recipe.data.build())
    batches = step_batches(recipe, encoder, 0, mesh=Rank(3, 4))

    assert [batch.weights.tolist() for batch in batches] == [[0.0]]


def test_each_epoch_is_another_order_of_all_samples():
    epochs = [[sample_index(50, 50 * epoch + i, seed=1) for i in range(50)] for epoch in (0, 1)]

    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]


def test_dropped_captions_are_empty(recipe, adapter):
    encoder = SampleEncoder(adapter, recipe.data.build())
    always = step_batches(replace(recipe, caption_dropout=1.0), encoder, 0, mesh=Rank(0, 1))
    empty = adapter.encode_text([""])

    for row in always[0].text["pooled_projections"]:
        torch.testing.assert_close(row, empty["pooled_projections"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, "num_steps is 0"),
        ({"caption_dropout": 1.5}, "caption_dropout is 1.5"),
        ({"max_given_frames": -1}, "max_given_frames is -1"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1"),
        ({"save_s": 0.0}, "save_s is 0.0; it must be above 0"),
        ({"save_s": float("inf")}, "save_s is inf; it must be finite"),
    ],
)
def test_settings_out_of_range_are_refused(recipe, change, message):
    with pytest.raises(WfmConfigError, match=message):
        replace(recipe, **change)


def test_image_sizes_that_do_not_fit_the_model_are_refused(recipe):
    data = replace(recipe.data, height=18)

    with pytest.raises(WfmConfigError, match="18x16 pixels, but this model needs multiples of 4"):
        train_sft(replace(recipe, data=data))


def test_a_rank_below_one_is_refused():
    with pytest.raises(WfmConfigError, match="rank 0"):
        LoraTuning(rank=0)


class Rank:
    """The two numbers of a mesh that data asks for."""

    def __init__(self, data_rank, data_size):
        self.data_rank = data_rank
        self.data_size = data_size


def test_every_rank_draws_the_same_first_adapters(model_dir):
    drawn = []
    for torch_seed, seed in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(torch_seed)
        adapter = load_adapter(model_dir)
        LoraTuning(rank=2).prepare(adapter, seed=seed)
        drawn.append(
            torch.cat([p.flatten() for p in adapter.transformer.parameters() if p.requires_grad])
        )

    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_computing_activations_again_changes_no_loss(recipe):
    few = replace(recipe, num_steps=3)
    _, kept = trained(few)
    _, again = trained(replace(few, output=f"{recipe.output}-again", recompute=True))

    assert again == pytest.approx(kept, abs=1e-6)


def test_axes_without_a_plan_are_refused(recipe):
    with pytest.raises(WfmConfigError, match=r"parallel\.tp is 2"):
        replace(recipe, parallel=ParallelConfig(tp=2))
    with pytest.raises(WfmConfigError, match=r"parallel\.pp_schedule is ZBVZeroBubble"):
        replace(recipe, parallel=ParallelConfig(pp_schedule="ZBVZeroBubble"))
    assert replace(recipe, parallel=ParallelConfig(dp_replicate=2)).parallel.dp_replicate == 2
