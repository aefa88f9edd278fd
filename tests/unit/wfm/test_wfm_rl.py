"""RL steps on tiny pipelines: policies, rollouts, what is saved."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from cosmos_parallel import AdamWConfig, EmaConfig, LearnerConfig
from cosmos_wfm import (
    AwmConfig,
    CopiedPolicies,
    DdrlConfig,
    DiffusionRl,
    DiffusionRlConfig,
    DisaggregatedConfig,
    FlowGrpoConfig,
    FullTuning,
    ImageCaptionsConfig,
    LoraPolicies,
    LoraTuning,
    NftConfig,
    NoSafetyChecker,
    OldPolicyDecay,
    RewardServiceConfig,
    SamplerConfig,
    SdeConfig,
    WfmConfigError,
    denoisers_of,
    load_adapter,
    train_rl,
)

ALGORITHMS = {
    "nft": NftConfig(kl=0.01),
    "awm": AwmConfig(kl=0.01),
    "flow_grpo": FlowGrpoConfig(clip=0.1, kl=0.01),
    "dance_window": FlowGrpoConfig(clip=0.1, sde=SdeConfig(kind="dance", eta=0.3, num_noisy=1)),
}


@pytest.fixture
def recipe(model_dirs, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red square\n\na blue square\na green square\n")
    return DiffusionRlConfig(
        model=str(model_dirs("sd3")),
        prompts=str(tmp_path / "prompts.txt"),
        output=str(tmp_path / "out"),
        rewards={"brightness": 1.0},
        num_steps=2,
        groups_per_step=2,
        samples_per_group=3,
        micro_batch_size=2,
        sampler=SamplerConfig(num_steps=3, height=16, width=16),
        tuning=LoraTuning(rank=2, alpha=6),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=1e-2), max_grad_norm=1e9),
    )


def output(adapter, module):
    generator = torch.Generator().manual_seed(3)
    frames = 5 if adapter.temporal_factor else 1
    latents = torch.randn(1, *adapter.latent_shape(frames, 32, 32), generator=generator)
    # Frozen: torch multiplies matrices in another order where one of them wants a gradient.
    wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    with torch.no_grad():
        # On both sides of Wan 2.2's boundary.
        levels = torch.tensor([0.95, 0.6])
        latents, text = latents.expand(2, *latents.shape[1:]), adapter.encode_text(["a", "a"])
        found = adapter.velocity(module, latents, levels, text)
    for parameter in wanted:
        parameter.requires_grad_()
    return found


def shaken(adapter):
    """Give the trained weights other values, as training would."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in adapter.transformer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("tuning", [LoraTuning(rank=2, alpha=6), FullTuning()])
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_every_algorithm_trains_with_lora_and_in_full(recipe, algorithm, tuning):
    run = DiffusionRl(replace(recipe, algorithm=algorithm, tuning=tuning))
    before = output(run.adapter, run.adapter.transformer)

    reports = [run.step(step) for step in range(2)]

    assert all(report.outcome == "updated" for report, _ in reports)
    assert all(report.grad_norm > 0 for report, _ in reports)
    assert (output(run.adapter, run.adapter.transformer) - before).abs().max() > 1e-4
    if isinstance(algorithm, FlowGrpoConfig):
        # Of the first step's six samples: rollout and training give the same probability.
        report, _ = reports[0]
        assert report.mean("ratio", over="samples") == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("form", ["paper", "shortcut"])
def test_ddrl_trains_on_steps_and_data_together(recipe, data_dir, form):
    data = ImageCaptionsConfig(path=str(data_dir), height=16, width=16)
    policy = FlowGrpoConfig(clip=0.1, sde=SdeConfig(num_noisy=1))
    algorithm = DdrlConfig(form=form, data_weight=0.5, policy=policy)
    report, _ = DiffusionRl(replace(recipe, algorithm=algorithm, data=data)).step(0)

    assert report.outcome == "updated"
    assert report.mean("ratio", over="samples") == pytest.approx(1.0, abs=1e-5)
    # Advantages sum to 0 and ratios are 1: what is left is the data's share.
    assert report.loss == pytest.approx(0.5 * report.mean("data_loss", over="samples"), abs=1e-4)
    with pytest.raises(WfmConfigError, match="ddrl needs data"):
        replace(recipe, algorithm=algorithm)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_old_and_reference_stay_where_they_were_until_they_are_moved(model_dirs, kind):
    adapter = load_adapter(model_dirs("sd3"))
    base = output(adapter, adapter.transformer)
    tuning = LoraTuning(rank=2, alpha=6) if kind == "lora" else FullTuning()
    tuning.prepare(adapter, seed=0)
    policies = (
        LoraPolicies(adapter)
        if kind == "lora"
        else CopiedPolicies(adapter, old=True, reference=True)
    )
    shaken(adapter)
    trained = output(adapter, adapter.transformer)
    with policies.old() as module:
        torch.testing.assert_close(output(adapter, module), base)
    policies.update_old(0.0)
    with policies.old() as module:
        torch.testing.assert_close(output(adapter, module), trained)
    with policies.reference() as module:
        torch.testing.assert_close(output(adapter, module), base)

    torch.testing.assert_close(output(adapter, adapter.transformer), trained)
    names = {n for n, p in adapter.transformer.named_parameters() if p.requires_grad}
    assert names
    assert not any(".old." in name for name in names)
    assert (trained - base).abs().max() > 1e-3


def test_the_old_policy_moves_by_its_decay(model_dirs):
    adapter = load_adapter(model_dirs("sd3"))
    LoraTuning(rank=2, alpha=4).prepare(adapter, seed=0)
    policies = LoraPolicies(adapter)
    weights = dict(adapter.transformer.named_parameters())
    name = next(n for n in weights if ".lora_B.default." in n)
    with torch.no_grad():
        weights[name].fill_(1.0)

    policies.update_old(0.75)

    assert weights[name.replace("default", "old")].unique().tolist() == [0.25]


def test_a_family_trains_by_nft_and_its_lora_reloads_bit_for_bit(family, recipe, model_dirs):
    size = {"sampler": SamplerConfig(num_steps=2, height=32, width=32)}
    if family not in {"sd3", "sana"}:
        size["sampler"] = replace(size["sampler"], frames=5)
    run = DiffusionRl(replace(recipe, model=str(model_dirs(family)), micro_batch_size=6, **size))
    report, _ = run.step(0)
    shaken(run.adapter)
    directory = run.save(1)

    extra = {"safety_checker": NoSafetyChecker()} if family == "cosmos" else {}
    pipeline = DiffusionPipeline.from_pretrained(model_dirs(family), **extra)
    pipeline.load_lora_weights(
        directory / "lora", weight_name="model.safetensors", adapter_name="default"
    )
    if family == "wan22":
        pipeline.load_lora_weights(
            directory / "lora",
            weight_name="transformer_2.safetensors",
            adapter_name="default",
            load_into_transformer_2=True,
        )
    assert report.outcome == "updated"
    expected = output(run.adapter, run.adapter.transformer)
    pipeline.transformer.requires_grad_(False)
    reloaded = type(run.adapter)(pipeline)
    assert torch.equal(output(reloaded, reloaded.transformer), expected)
    with run.policies.reference() as module:
        assert (output(run.adapter, module) - expected).abs().max() > 1e-4


def test_full_tuning_of_a_family_is_saved_as_a_pipeline(family, model_dirs, tmp_path):
    adapter = load_adapter(model_dirs(family))
    FullTuning().prepare(adapter, seed=0)
    shaken(adapter)

    FullTuning().save(adapter, tmp_path / "saved", writes=True)

    again = load_adapter(tmp_path / "saved")
    own, saved = adapter.transformer.state_dict(), again.transformer.state_dict()
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[name], saved[name]) for name in own)
    for name, module in denoisers_of(adapter).items():
        assert getattr(adapter.pipeline, name) is module


def test_an_average_of_the_weights_is_what_is_saved(recipe, model_dirs):
    learner = replace(recipe.learner, ema=EmaConfig(decay=0.5, ramp=False))
    run = DiffusionRl(replace(recipe, learner=learner, tuning=FullTuning()))
    run.step(0)
    saved = load_adapter(run.save(1)).transformer.state_dict()

    before = load_adapter(model_dirs("sd3")).transformer.state_dict()
    for name, value in run.adapter.transformer.state_dict().items():
        if value.is_floating_point() and name in run.learner.ema.averages:
            torch.testing.assert_close(saved[name], (before[name] + value) / 2)


def test_micro_batches_change_nothing(recipe):
    losses = []
    for size in (6, 1):
        run = DiffusionRl(replace(recipe, micro_batch_size=size))
        losses.append([run.step(step)[0].loss for step in range(2)])

    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)


def test_guidance_is_in_rollouts_and_training_of_flow_grpo(recipe):
    guided = replace(
        recipe,
        algorithm=ALGORITHMS["flow_grpo"],
        sampler=replace(recipe.sampler, guidance=3.0),
    )
    report, _ = DiffusionRl(guided).step(0)

    assert report.mean("ratio", over="samples") == pytest.approx(1.0, abs=1e-5)


def test_brightness_rises_under_nft(recipe):
    run = DiffusionRl(
        replace(
            recipe,
            samples_per_group=8,
            micro_batch_size=16,
            algorithm=NftConfig(kl=0.0, decay=OldPolicyDecay(rate=0.0)),
            tuning=FullTuning(),
            learner=LearnerConfig(optimizer=AdamWConfig(lr=3e-3)),
        )
    )
    rewards = [run.step(step)[1]["reward"] for step in range(12)]

    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.02


def test_a_run_writes_its_last_step_and_says_what_it_earned(recipe):
    seen = []
    directory = train_rl(
        replace(recipe, num_steps=1), on_step=lambda step, report, figures: seen.append(figures)
    )

    assert directory.name == "step_1"
    assert (directory / "lora" / "model.safetensors").is_file()
    assert 0 < seen[0]["reward"] < 1
    assert seen[0]["groups_without_signal"] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples_per_group": 1}, "advantages need 2 or more"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"rewards": {"shine": 1.0}}, "shine is no reward"),
        ({"sampler": SamplerConfig(guidance=4.5)}, "without guidance"),
        ({"seed": -1}, "seed is -1"),
        ({"save_every": -1}, "save_every is -1"),
        ({"rewards": {"brightness": math.nan}}, "brightness has the weight nan"),
        ({"rewards": {"brightness": 0.0}}, "brightness: every weight is 0"),
        (
            {"reward_service": RewardServiceConfig(score_keys={"ocr": "score"})},
            "score_keys names ocr; rewards are brightness",
        ),
    ],
)
def test_settings_that_cannot_run_are_refused(recipe, change, message):
    with pytest.raises(WfmConfigError, match=message):
        replace(recipe, **change)


def test_prompts_must_be_there_and_enough(recipe, tmp_path):
    with pytest.raises(WfmConfigError, match="no file of prompts"):
        DiffusionRl(replace(recipe, prompts=str(tmp_path / "absent.txt")))
    with pytest.raises(WfmConfigError, match="3 prompts, but 4 are needed at once"):
        DiffusionRl(replace(recipe, groups_per_step=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": SamplerConfig(height=17, width=16)}, "sampler: 17x16 pixels.*multiples of 4"),
        ({"sampler": SamplerConfig(height=16, width=16, frames=5)}, "sampler: 5 frames, but this"),
        ({"tuning": LoraTuning(targets=("foo",))}, "lora: SD3Transformer2DModel has no.*attn.to_q"),
        ({"rewards": {}}, r"nothing is no reward.*train_rl\(scorer=...\)"),
    ],
)
def test_what_the_model_does_not_take_is_refused_before_anything_is_drawn(recipe, change, message):
    with pytest.raises(WfmConfigError, match=message):
        DiffusionRl(replace(recipe, **change))


def test_a_step_that_is_not_finite_changes_neither_weights_nor_their_average(recipe):
    learner = replace(recipe.learner, ema=EmaConfig(decay=0.9))
    config = replace(
        recipe, tuning=FullTuning(), algorithm=NftConfig(kl=0.1), learner=learner, rewards={}
    )
    run = DiffusionRl(config, scorer=lambda pixels, prompts: pixels.flatten(1).mean(1))
    parameter = next(run.adapter.transformer.parameters())
    (name,) = (n for n, p in run.adapter.transformer.named_parameters() if p is parameter)
    reference = next(run.policies.modules()[1][0].parameters())

    assert run.step(0)[0].outcome == "updated"
    weights, average = parameter.detach().clone(), run.learner.ema.averages[name].clone()
    whole = reference.clone()
    reference.fill_(math.nan)
    report = run.step(1)[0]
    assert report.outcome == "non_finite"
    assert "(sample 0 of the step, " in report.problem
    assert torch.equal(parameter, weights)
    assert torch.equal(run.learner.ema.averages[name], average)

    reference.copy_(whole)
    run.step(2)
    # The second update, whose decay is (1 + 1) / (10 + 1): a skipped step is none.
    wanted = 2 / 11 * average + 9 / 11 * parameter.detach()
    torch.testing.assert_close(run.learner.ema.averages[name], wanted)


def test_broken_data_of_ddrl_is_named(recipe, data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    for number in (1, 2, 3):
        (tmp_path / "data" / f"{number:04d}.png").write_bytes(b"no picture")
    data = ImageCaptionsConfig(path=str(tmp_path / "data"), height=16, width=16, broken="skip")
    run = DiffusionRl(replace(recipe, algorithm=DdrlConfig(), data=data))

    run.step(0)

    named = (tmp_path / "out" / "left_out_rank0.txt").read_text().splitlines()
    assert {Path(line.split()[0]).name for line in named} == {"0001.png", "0002.png", "0003.png"}


def test_a_scorer_may_be_a_plain_function(recipe):
    recipe = replace(recipe, rewards={}, num_steps=1)
    found = DiffusionRl(recipe, scorer=lambda pixels, prompts: pixels.flatten(1).mean(1)).step(0)
    run = DiffusionRl(recipe, scorer=lambda pixels, prompts: [float(p.mean()) for p in pixels])
    figures = run.step(0)[1]
    for name in ("reward", "reward_std", "groups_without_signal"):
        assert figures[name] == pytest.approx(found[1][name], abs=1e-6)


def test_rewards_of_a_service_need_no_names_here_where_replicas_draw(recipe):
    recipe = replace(
        recipe,
        rewards={"pickscore": 1.0},
        reward_service=RewardServiceConfig(),
        disaggregated=DisaggregatedConfig(),
    )
    parts = []
    DiffusionRl(recipe, remote=lambda weights, divided: parts.append(divided))
    assert [part.num_samples for part in parts] == [6]
