"""Recipes held against their model, data and prompts before a run: nothing is loaded or trained."""

import shutil
from dataclasses import replace

import pytest

from cosmos_parallel import ParallelConfig
from cosmos_wfm import (
    CaptionDataError,
    ComputeConfig,
    DdrlConfig,
    DiffusionRl,
    DiffusionRlConfig,
    DiffusionSftConfig,
    DisaggregatedConfig,
    FlowGrpoConfig,
    FullTuning,
    ImageCaptionsConfig,
    LoraTuning,
    MockCaptionsConfig,
    PipelineError,
    RewardServiceConfig,
    SamplerConfig,
    ValidationConfig,
    WfmConfigError,
    forecast_run,
    load_outline,
    train_sft,
)

SMALL = SamplerConfig(num_steps=2, height=32, width=32)


@pytest.fixture
def sft(model_dirs, tmp_path):
    return DiffusionSftConfig(
        model=str(model_dirs("sd3")),
        data=MockCaptionsConfig(num_samples=10, height=32, width=32),
        output=str(tmp_path / "out"),
        num_steps=5,
        batch_size=4,
        tuning=LoraTuning(rank=2, alpha=4),
    )


@pytest.fixture
def rl(model_dirs, tmp_path):
    return DiffusionRlConfig(
        model=str(model_dirs("sd3")),
        prompts="mock",
        output=str(tmp_path / "out"),
        rewards={"prompt_colour": 1.0},
        sampler=SMALL,
        num_steps=4,
    )


def test_an_outline_has_the_sizes_and_parameters_of_the_model_but_no_weights(
    family_adapter, family, model_dirs
):
    outline, whole = load_outline(model_dirs(family)), family_adapter

    assert {p.device.type for p in outline.transformer.parameters()} == {"meta"}
    shapes = [
        {name: p.shape for name, p in adapter.transformer.named_parameters()}
        for adapter in (outline, whole)
    ]
    assert shapes[0] == shapes[1]
    sizes = [
        (a.size_multiple, a.temporal_factor, a.shift, a.latent_shape(1, 32, 32), len(a.blocks))
        for a in (outline, whole)
    ]
    assert sizes[0] == sizes[1]


def test_a_forecast_counts_parameters_ranks_and_epochs(sft, rl):
    lora = forecast_run(sft)
    full = forecast_run(
        replace(sft, tuning=FullTuning(), parallel=ParallelConfig(dp_shard=2, dp_replicate=3))
    )
    apart = forecast_run(
        replace(rl, parallel=ParallelConfig(cp=2), disaggregated=DisaggregatedConfig(replicas=3))
    )

    assert (lora.samples, lora.epochs) == (10, 5 * 4 / 10)
    assert (lora.ranks, lora.fills_ranks) == (1, True)
    # the adapters come to the weights of the model, which stay as they are
    assert lora.trained_parameters == lora.parameters - full.parameters > 0
    assert full.trained_parameters == full.parameters
    assert (full.ranks, full.fills_ranks) == (6, False)
    # weights, gradients and two moments in float32, over two ranks of each copy
    assert full.memory_mib == pytest.approx(4 * 4 * full.parameters / 2 / 2**20)
    assert (apart.ranks, apart.replicas) == (2, 3)
    assert (apart.prompts, apart.rounds) == (16, 4 * 8 / 16)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": "/nowhere"}, PipelineError, "it has no model_index.json"),
        (
            {"data": MockCaptionsConfig(height=33, width=32)},
            WfmConfigError,
            "data: 33x32 pixels, but this model needs multiples of",
        ),
        (
            {"data": MockCaptionsConfig(height=32, width=32, frames=5)},
            WfmConfigError,
            "5 frames, but this is a model of images",
        ),
        (
            {"data": ImageCaptionsConfig(path="/nowhere", height=32, width=32)},
            CaptionDataError,
            "/nowhere is not a directory",
        ),
        ({"tuning": LoraTuning(targets=("nothing",))}, WfmConfigError, "has no layers to adapt"),
        (
            {"tuning": LoraTuning(targets=("attn.to_q", "attn.to_kk"))},
            WfmConfigError,
            "has no layers to adapt called attn.to_kk;",
        ),
        (
            {"compute": ComputeConfig(dtype="bfloat16", keep_float32=("nothing",))},
            WfmConfigError,
            "keep_float32 names nothing",
        ),
        (
            {"validation": ValidationConfig(prompts=("x",), sampler=replace(SMALL, width=33))},
            WfmConfigError,
            "validation.sampler: 32x33 pixels",
        ),
        (
            {"parallel": ParallelConfig(cp=3)},
            PipelineError,
            "a sample of 64 latent tokens cannot be divided among the 3 ranks of parallel.cp",
        ),
    ],
)
def test_a_supervised_recipe_that_cannot_run_is_refused(sft, changes, error, said):
    with pytest.raises(error, match=said):
        forecast_run(replace(sft, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": "/nowhere"}, "there is no file of prompts /nowhere"),
        ({"sampler": replace(SMALL, frames=5)}, "this is a model of images"),
        (
            {
                "sampler": replace(SMALL, guidance=2.0, guidance_2=1.0),
                "algorithm": FlowGrpoConfig(),
            },
            "sampler: guidance_2 is the scale of the second of two denoisers",
        ),
        (
            {"reward_service": RewardServiceConfig(send="latents")},
            "this model has a AutoencoderKL",
        ),
    ],
)
def test_a_recipe_with_rewards_that_cannot_run_is_refused(rl, changes, said):
    with pytest.raises((WfmConfigError, PipelineError), match=said):
        forecast_run(replace(rl, **changes))


def test_a_frame_that_ranks_cannot_share_and_a_denoiser_without_plan_are_refused(sft, model_dirs):
    shared = replace(sft, parallel=ParallelConfig(cp=2))
    video = MockCaptionsConfig(height=32, width=32, frames=9)

    with pytest.raises(PipelineError, match="3 latent frames cannot be divided among the 2 ranks"):
        forecast_run(replace(shared, model=str(model_dirs("sana_video")), data=video))
    with pytest.raises(WfmConfigError, match="no plan for SanaTransformer2DModel"):
        forecast_run(replace(shared, model=str(model_dirs("sana"))))


def test_a_pipeline_whose_weights_are_missing_is_refused_by_forecast_and_run(sft, tmp_path):
    shutil.copytree(sft.model, tmp_path / "model")
    for file in (tmp_path / "model" / "transformer").glob("*.safetensors"):
        file.unlink()
    broken = replace(sft, model=str(tmp_path / "model"))

    with pytest.raises(PipelineError, match=r"has no weights .* of SD3Transformer2DModel"):
        forecast_run(broken)
    with pytest.raises(PipelineError, match=r"model cannot be loaded: .*no file named"):
        train_sft(broken)


def test_a_prompt_that_a_reward_cannot_be_computed_for_is_refused_before_the_first_step(
    rl, tmp_path
):
    (tmp_path / "prompts.txt").write_text("a red square\na square\n")
    asked = replace(rl, prompts=str(tmp_path / "prompts.txt"), groups_per_step=1)

    for look in (forecast_run, DiffusionRl):
        with pytest.raises(WfmConfigError, match="'a square' names none of"):
            look(asked)
    (tmp_path / "prompts.txt").write_text("a red square\nnothing at all\n")
    with pytest.raises(WfmConfigError, match="'nothing at all'"):
        forecast_run(replace(asked, rewards={"shape_count": 1.0}))
    assert forecast_run(replace(asked, rewards={"brightness": 1.0})).prompts == 2


def test_what_does_not_go_with_an_algorithm_is_refused_by_the_config(rl):
    buckets = MockCaptionsConfig(buckets=((32, 64), (64, 32)))
    with pytest.raises(WfmConfigError, match=r"data.buckets has 2 sizes, but ddrl .* now 4, to 1"):
        replace(rl, algorithm=DdrlConfig(), data=buckets)
    with pytest.raises(WfmConfigError, match="no step of 1 has noise"):
        replace(rl, algorithm=FlowGrpoConfig(), sampler=replace(SMALL, num_steps=1))
    one = replace(rl, algorithm=DdrlConfig(), data=buckets, micro_batch_size=1)
    assert forecast_run(one).samples == 64
