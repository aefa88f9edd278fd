"""Wan 2.2's two denoisers: which is asked, what each learns, and how they are saved."""

from dataclasses import replace

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from cosmos_parallel import AdamWConfig, EmaConfig, LearnerConfig
from cosmos_wfm import (
    DiffusionRl,
    DiffusionRlConfig,
    DiffusionSftConfig,
    FlowBatch,
    FlowGrpoConfig,
    FlowMatchingConfig,
    FullTuning,
    Guidance,
    LoraTuning,
    MockCaptionsConfig,
    NftConfig,
    NoiseExperts,
    PipelineError,
    SamplerConfig,
    SdeConfig,
    ValidationConfig,
    WfmConfigError,
    check_model,
    draw_samples,
    find_adapter,
    flow_matching_loss,
    guided_velocity,
    load_adapter,
    tiny_wan_pipeline,
    train_sft,
)

SIZE = 32
HIGH, LOW = "transformer", "transformer_2"


@pytest.fixture
def adapter(model_dirs):
    return load_adapter(model_dirs("wan22"))


@pytest.fixture
def recipe(model_dirs, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red square\na blue square\n")
    return DiffusionRlConfig(
        model=str(model_dirs("wan22")),
        prompts=str(tmp_path / "prompts.txt"),
        output=str(tmp_path / "out"),
        rewards={"brightness": 1.0},
        num_steps=2,
        groups_per_step=1,
        samples_per_group=2,
        micro_batch_size=2,
        # levels 1, 0.9, 0.75 and 0.5: two on each side of the boundary 0.875
        sampler=SamplerConfig(num_steps=4, height=SIZE, width=SIZE, frames=5),
        tuning=LoraTuning(rank=2, alpha=6),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=1e-2), max_grad_norm=1e9),
    )


def batch_at(adapter, levels):
    generator = torch.Generator().manual_seed(0)
    shape = (len(levels), *adapter.latent_shape(5, SIZE, SIZE))
    return FlowBatch(
        latents=torch.randn(shape, generator=generator),
        noise=torch.randn(shape, generator=generator),
        sigmas=torch.tensor(levels),
        text=adapter.encode_text(["a red square"] * len(levels)),
        weights=torch.ones(len(levels)),
    )


def gradients(module):
    return [p.grad for p in module.parameters() if p.grad is not None]


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def has_changed(module, before):
    return any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_each_level_is_answered_by_its_own_denoiser_and_the_boundary_by_the_first(adapter):
    batch = batch_at(adapter, [0.3, 0.95, 0.875, 0.8749])
    with torch.no_grad():
        found = adapter.velocity(adapter.transformer, batch.latents, batch.sigmas, batch.text)
        for row, name in enumerate((LOW, HIGH, HIGH, LOW)):
            own = slice(row, row + 1)
            (expected,) = getattr(adapter.pipeline, name)(
                hidden_states=batch.latents[own],
                timestep=batch.sigmas[own] * 1000,
                encoder_hidden_states=batch.text["encoder_hidden_states"][own],
                return_dict=False,
            )
            torch.testing.assert_close(found[own], expected, msg=f"row {row}")


def test_guidance_has_a_scale_of_its_own_below_the_boundary(adapter):
    batch = batch_at(adapter, [0.95, 0.3, 0.875])
    negative = adapter.encode_negative(3)
    inputs = (batch.latents, batch.sigmas)

    def velocity(text, guidance, other=None):
        with torch.no_grad():
            return guided_velocity(adapter, adapter.transformer, inputs, text, other, guidance)

    found = velocity(batch.text, Guidance(4.0, 3.0), negative)
    towards = velocity(batch.text, Guidance(1.0))
    away = velocity(negative, Guidance(1.0))
    scales = torch.tensor([4.0, 3.0, 4.0]).view(3, 1, 1, 1, 1)
    torch.testing.assert_close(found, away + scales * (towards - away))
    assert torch.equal(
        velocity(batch.text, Guidance(4.0), negative),
        velocity(batch.text, Guidance(4.0, 4.0), negative),
    )


def test_a_second_scale_is_refused_where_there_is_no_second_denoiser(model_dirs):
    shown = ValidationConfig(
        prompts=("a red square",),
        samples_per_prompt=1,
        sampler=SamplerConfig(
            num_steps=1, height=SIZE, width=SIZE, frames=5, guidance=4.0, guidance_2=3.0
        ),
    )
    with pytest.raises(WfmConfigError, match="second of two denoisers, but this pipeline has one"):
        draw_samples(load_adapter(model_dirs("wan")), shown)
    with pytest.raises(WfmConfigError, match=r"guidance_2 is 3\.0, but guidance is 0"):
        SamplerConfig(guidance_2=3.0)


@pytest.mark.parametrize(("levels", "trained"), [([0.9, 0.99], HIGH), ([0.2, 0.5], LOW)])
def test_a_denoiser_that_no_level_is_for_is_neither_called_nor_trained(adapter, levels, trained):
    called = []
    for name in (HIGH, LOW):
        getattr(adapter.pipeline, name).register_forward_pre_hook(
            lambda module, args, name=name: called.append(name)
        )
    FullTuning().prepare(adapter, seed=0)
    flow_matching_loss(adapter, FlowMatchingConfig())(
        adapter.transformer, batch_at(adapter, levels)
    ).total.backward()

    assert called == [trained]
    for name in (HIGH, LOW):
        assert bool(gradients(getattr(adapter.pipeline, name))) == (name == trained)


def test_gradients_of_mixed_levels_are_those_of_each_denoiser_by_itself(adapter):
    FullTuning().prepare(adapter, seed=0)
    batch = batch_at(adapter, [0.3, 0.95, 0.9])
    loss = flow_matching_loss(adapter, FlowMatchingConfig())
    loss(adapter.transformer, batch).total.backward()
    mixed = {name: p.grad.clone() for name, p in adapter.transformer.named_parameters()}
    adapter.transformer.zero_grad()

    # one sample at a time, straight to the denoiser that it is for
    for row, name in enumerate((LOW, HIGH, HIGH)):
        own = slice(row, row + 1)
        alone = FlowBatch(
            latents=batch.latents[own],
            noise=batch.noise[own],
            sigmas=batch.sigmas[own],
            text={key: value[own] for key, value in batch.text.items()},
            weights=batch.weights[own],
        )
        loss(getattr(adapter.pipeline, name), alone).total.backward()

    for name, parameter in adapter.transformer.named_parameters():
        torch.testing.assert_close(mixed[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("tuning", [LoraTuning(rank=2, alpha=6), FullTuning()])
def test_fine_tuning_trains_both_and_what_is_saved_is_what_was_trained(
    tuning, model_dirs, tmp_path
):
    config = DiffusionSftConfig(
        model=str(model_dirs("wan22")),
        data=MockCaptionsConfig(num_samples=4, height=SIZE, width=SIZE, frames=5),
        output=str(tmp_path),
        num_steps=2,
        batch_size=4,
        micro_batch_size=2,
        checkpoint_every=1,
        recompute=True,
        tuning=tuning,
        flow=FlowMatchingConfig(density="uniform"),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=1e-2), ema=EmaConfig(decay=0.5)),
    )
    losses = []
    saved = train_sft(config, on_step=lambda step, report, figures: losses.append(report.loss))

    if isinstance(tuning, FullTuning):
        trained = DiffusionPipeline.from_pretrained(saved)
        first = load_adapter(model_dirs("wan22")).pipeline
        assert trained.config.boundary_ratio == 0.875
        for name in (HIGH, LOW):
            assert has_changed(getattr(trained, name), weights(getattr(first, name))), name
    else:
        for file in ("model.safetensors", "transformer_2.safetensors"):
            state = load_file(saved / "lora" / file)
            assert all(key.startswith("transformer.") for key in state)
            moved = [value for key, value in state.items() if ".lora_B." in key]
            assert max(value.abs().max() for value in moved) > 0, file
    # One step, then the other from its checkpoint: the same loss.
    again = []
    short = replace(config, num_steps=1, output=str(tmp_path / "again"))
    train_sft(short)
    train_sft(
        replace(short, num_steps=2),
        resume=True,
        on_step=lambda step, report, figures: again.append(report.loss),
    )
    assert again == losses[1:]


@pytest.mark.parametrize(
    "algorithm",
    [NftConfig(kl=0.01), FlowGrpoConfig(clip=0.1, kl=0.01)],
    ids=["nft", "flow_grpo"],
)
@pytest.mark.parametrize("tuning", [LoraTuning(rank=2, alpha=6), FullTuning()])
def test_rl_trains_both_denoisers(recipe, algorithm, tuning):
    run = DiffusionRl(replace(recipe, algorithm=algorithm, tuning=tuning))
    before = {name: weights(part) for name, part in run.adapter.transformer.parts.items()}
    report, _ = run.step(0)

    assert report.outcome == "updated"
    for name, part in run.adapter.transformer.parts.items():
        assert has_changed(part, before[name]), name
    if isinstance(algorithm, FlowGrpoConfig):
        assert report.mean("ratio", over="samples") == pytest.approx(1.0, abs=1e-5)


def test_noise_in_the_first_steps_only_trains_the_first_denoiser_only(recipe):
    window = FlowGrpoConfig(clip=0.1, sde=SdeConfig(num_noisy=2))
    run = DiffusionRl(replace(recipe, algorithm=window))
    before = {name: weights(part) for name, part in run.adapter.transformer.parts.items()}
    run.step(0)

    changed = {n: has_changed(p, before[n]) for n, p in run.adapter.transformer.parts.items()}
    assert changed == {HIGH: True, LOW: False}


def test_the_checklist_asks_both_denoisers(model_dirs):
    points = {point.name: point for point in check_model(model_dirs("wan22"))}
    single = {point.name: point for point in check_model(model_dirs("wan"))}

    def num_gradients(report):
        return int(report["SFT forward"].detail.split(", ")[1].split()[0])

    assert all(point.passed for point in points.values())
    assert num_gradients(points) == 2 * num_gradients(single)


def test_a_boundary_without_a_second_denoiser_is_refused():
    pipeline = tiny_wan_pipeline(num_layers=1, boundary=0.5)
    assert isinstance(find_adapter("WanPipeline")(pipeline).transformer, NoiseExperts)
    pipeline.register_modules(transformer_2=None)

    with pytest.raises(PipelineError, match="but not both of them"):
        find_adapter("WanPipeline")(pipeline)
