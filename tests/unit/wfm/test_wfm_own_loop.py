"""Losses and samplers in a script of one's own: what torch would have computed otherwise."""

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import EMAModel, cast_training_params
from peft import LoraConfig

from cosmos_wfm import (
    AwmConfig,
    CopiedPolicies,
    FlowBatch,
    FlowGrpoConfig,
    FlowMatchingConfig,
    ForwardBatch,
    LoraPolicies,
    NftConfig,
    PipelineError,
    SdeConfig,
    StepBatch,
    WfmConfigError,
    adapt_pipeline,
    awm_loss,
    flow_grpo_loss,
    flow_matching_loss,
    flow_schedule,
    nft_loss,
    sample_ode,
    sample_sde,
    tiny_cosmos_pipeline,
    tiny_sana_pipeline,
    tiny_sd3_pipeline,
    tiny_wan_pipeline,
)

SIZE = (1, 16, 16)


def frozen(make=tiny_sd3_pipeline):
    torch.manual_seed(0)
    adapter = adapt_pipeline(make(num_layers=1))
    for part in adapter.pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    return adapter


def add_lora(adapter, **settings):
    targets = list(adapter.lora_targets)
    given = {"r": 2, "lora_alpha": 4, "target_modules": targets, **settings}
    adapter.transformer.add_adapter(LoraConfig(**given))


def drawn(adapter, num=2):
    frames = 5 if adapter.temporal_factor else 1
    shape = adapter.latent_shape(frames, 32, 32)
    text = adapter.encode_text(["a red square"] * num)
    return {"latents": torch.randn(num, *shape), "noise": torch.randn(num, *shape), "text": text}


def flow_batch(adapter, **changes):
    rows = {"sigmas": torch.tensor([0.25, 0.75]), "weights": torch.ones(2)}
    return FlowBatch(**{**drawn(adapter), **rows, **changes})


def forward_batch(adapter, **changes):
    rows = {"sigmas": torch.tensor([0.25, 0.75]), "weights": torch.ones(2)}
    return ForwardBatch(**{**drawn(adapter), **rows, "advantages": torch.ones(2), **changes})


def step_batch(adapter, **changes):
    given = drawn(adapter)
    ones = torch.ones(2)
    return StepBatch(
        **{
            "latents": given["latents"],
            "following": given["noise"],
            "text": given["text"],
            "sigmas": 0.75 * ones,
            "next_sigmas": 0.5 * ones,
            "noise_levels": 0.7 * ones,
            "log_probs": 0.0 * ones,
            "advantages": ones,
            "weights": ones,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (flow_batch, {"weights": torch.ones(2, 1)}, r"weights is \(2, 1\).*has to be \(2,\)"),
        (flow_batch, {"sigmas": torch.tensor(0.5)}, r"sigmas is \(\)"),
        (flow_batch, {"noise": torch.zeros(1, 4, 16, 16)}, r"noise is \(1, 4, 16, 16\)"),
        (flow_batch, {"text": {"pooled": torch.zeros(1, 8)}}, r"text\['pooled'\] is \(1, 8\)"),
        (forward_batch, {"advantages": torch.ones(1)}, r"advantages is \(1,\)"),
        (forward_batch, {"advantages": torch.ones(2, 1)}, r"advantages is \(2, 1\)"),
        (step_batch, {"log_probs": torch.ones(2, 1)}, r"log_probs is \(2, 1\)"),
        (step_batch, {"following": torch.zeros(1, 4, 16, 16)}, "following is"),
    ],
)
def test_what_torch_would_stretch_to_the_batch_is_refused(make, change, said):
    with pytest.raises(WfmConfigError, match=said):
        make(frozen(), **change)


def test_timesteps_for_noise_levels_are_refused_by_every_loss():
    adapter = frozen()
    policies = CopiedPolicies(adapter, old=True, reference=True)
    wrong = {"sigmas": torch.tensor([20.0, 500.0])}
    losses = [
        (flow_matching_loss(adapter, FlowMatchingConfig()), flow_batch(adapter, **wrong)),
        (nft_loss(adapter, NftConfig(), policies), forward_batch(adapter, **wrong)),
        (awm_loss(adapter, AwmConfig(), policies), forward_batch(adapter, **wrong)),
        (flow_grpo_loss(adapter, FlowGrpoConfig(), policies), step_batch(adapter, **wrong)),
    ]
    for loss, batch in losses:
        with pytest.raises(WfmConfigError, match=r"sigmas are from 20 to 500.*in \[0, 1\]"):
            loss(adapter.transformer, batch)
    with pytest.raises(WfmConfigError, match="a step goes down"):
        flow_grpo_loss(adapter, FlowGrpoConfig(), policies)(
            adapter.transformer, step_batch(adapter, next_sigmas=torch.tensor([0.8, 0.5]))
        )


@pytest.mark.parametrize(
    "levels", [[1000.0, 500.0, 0.0], [0.0, 0.5, 1.0], [1.0, 0.5, 0.5, 0.0], [1.0, -0.1], [1.0]]
)
def test_samplers_refuse_levels_that_are_none(levels):
    noise, sigmas = torch.zeros(1, 2), torch.tensor(levels)
    with pytest.raises(WfmConfigError, match="want levels that fall from at most 1"):
        sample_ode(lambda x, s: x, noise, sigmas)
    with pytest.raises(WfmConfigError, match="want levels that fall from at most 1"):
        sample_sde(lambda x, s: x, noise, sigmas, SdeConfig(), [torch.Generator()])


def test_samples_that_would_share_their_noise_are_refused():
    with pytest.raises(WfmConfigError, match="1 generators for 3 samples"):
        sample_sde(
            lambda x, s: x, torch.zeros(3, 2), flow_schedule(3, 1.0), SdeConfig(),
            [torch.Generator()],
        )  # fmt: skip


def test_levels_of_a_scheduler_of_ones_own_are_sampled_as_it_samples():
    adapter = frozen()
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(4)
    given = drawn(adapter)

    def velocity(x, sigmas):
        return adapter.velocity(adapter.transformer, x, sigmas, given["text"])

    ours = sample_ode(velocity, given["noise"], scheduler.sigmas, order=1)
    theirs = given["noise"]
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            predicted = velocity(theirs, timestep.expand(2) / 1000)
            theirs = scheduler.step(predicted, timestep, theirs).prev_sample
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [tiny_sd3_pipeline, tiny_sana_pipeline, tiny_wan_pipeline])
def test_weights_in_bfloat16_are_given_what_they_compute_in(make):
    adapter = frozen(make)
    exact, given = copy.deepcopy(adapter.transformer), drawn(adapter)
    levels = torch.tensor([0.25, 0.75])
    adapter.transformer.to(torch.bfloat16)
    found = adapter.velocity(adapter.transformer, given["latents"], levels, given["text"])
    wanted = adapter.velocity(exact, given["latents"], levels, given["text"])

    assert found.dtype == torch.float32
    # bfloat16 has 8 bits, and errors of a few layers add up
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    "make",
    [tiny_cosmos_pipeline, tiny_sana_pipeline, tiny_sd3_pipeline, tiny_wan_pipeline],
)
@pytest.mark.parametrize("part", ["text_encoder", "transformer"])
def test_prompts_are_embedded_where_one_part_alone_is_in_bfloat16(make, part):
    def cast(**settings):
        pipeline = make(**settings)
        getattr(pipeline, part).to(torch.bfloat16)
        return pipeline

    exact, adapter = frozen(make), frozen(cast)
    levels, noise = torch.tensor([0.25, 0.75]), drawn(exact)["noise"]
    found, wanted = (
        each.velocity(each.transformer, noise, levels, each.encode_text(["red", "blue"]))
        for each in (adapter, exact)
    )

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=0.1, rtol=0.1)  # as above


def test_adapters_in_float32_over_weights_in_bfloat16_have_an_old_policy_as_exact():
    adapter = frozen()
    adapter.transformer.to(torch.bfloat16)
    add_lora(adapter)
    cast_training_params(adapter.transformer, torch.float32)
    policies = LoraPolicies(adapter)
    loss = nft_loss(adapter, NftConfig(kl=0.1), policies)
    loss(adapter.transformer, forward_batch(adapter)).total.backward()
    weights = dict(adapter.transformer.named_parameters())
    for name, weight in weights.items():
        if ".old." in name:
            assert weight.dtype == torch.float32
            weight.data += 1.0
    policies.update_old(0.5)
    for name, weight in weights.items():
        if ".old." in name:
            trained = weights[name.replace(".old.", ".default.")]
            torch.testing.assert_close(weight, trained + 0.5)


def trained_beside(adapter):
    add_lora(adapter)
    adapter.transformer.proj_out.requires_grad_(True)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda adapter: None, r"no LoRA adapters called 'default' alone \(there are: none\)"),
        (
            lambda adapter: adapter.transformer.add_adapter(
                LoraConfig(r=2, target_modules=["attn.to_q"]), adapter_name="mine"
            ),
            r"\(there are: mine\)",
        ),
        (lambda adapter: (add_lora(adapter), LoraPolicies(adapter)), r"\(there are: default, old"),
        (trained_beside, "proj_out.weight is trained beside the adapters, 2 parameters"),
        (lambda adapter: add_lora(adapter, modules_to_save=["proj_out"]), "modules_to_save is"),
    ],
)
def test_policies_refuse_what_they_could_not_switch_off(prepare, said):
    adapter = frozen()
    prepare(adapter)
    with pytest.raises(WfmConfigError, match=said):
        LoraPolicies(adapter)


def test_a_pipeline_is_adapted_by_its_class_or_one_that_it_is_derived_from():
    pipeline = tiny_sd3_pipeline(num_layers=1)
    mine = type("MyPipeline", (type(pipeline),), {})(**pipeline.components)
    assert adapt_pipeline(mine).pipeline is mine
    with pytest.raises(PipelineError, match="there is no adapter for object"):
        adapt_pipeline(object())


@pytest.fixture
def accelerated():
    """Give accelerators, whose settings are of the process and would be those of all tests."""

    def make(**settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, **settings)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accumulated_micro_batches_have_the_gradient_of_the_whole(accelerated):
    adapter = frozen()
    add_lora(adapter)
    loss = flow_matching_loss(adapter, FlowMatchingConfig())
    whole = flow_batch(adapter)
    trained = [each for each in adapter.transformer.parameters() if each.requires_grad]
    # written from the formula: the mean over samples of the mean squared error
    levels = whole.sigmas.view(-1, 1, 1, 1)
    noisy = (1 - levels) * whole.latents + levels * whole.noise
    velocity = adapter.transformer(
        hidden_states=noisy, timestep=1000 * whole.sigmas, return_dict=False, **whole.text
    )[0]
    errors = (velocity - (whole.noise - whole.latents)).square().flatten(1).mean(1)
    wanted = torch.autograd.grad(errors.mean(), trained)

    accelerator = accelerated(gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(trained, lr=0.0)
    model, optimizer = accelerator.prepare(adapter.transformer, optimizer)
    for row in range(2):
        own = slice(row, row + 1)
        part = replace(
            whole,
            latents=whole.latents[own],
            noise=whole.noise[own],
            sigmas=whole.sigmas[own],
            weights=whole.weights[own],
            text={name: value[own] for name, value in whole.text.items()},
        )
        with accelerator.accumulate(model):
            found = loss(model, part)
            accelerator.backward(found.total / found.weight)  # which divides by the steps
            optimizer.step()
    for weight, gradient in zip(trained, wanted, strict=True):
        torch.testing.assert_close(weight.grad, gradient, atol=1e-6, rtol=1e-4)


def test_in_autocast_old_policy_reference_and_copies_compute_as_the_trained_one(accelerated):
    adapter = frozen()
    adapter.transformer.requires_grad_(True)
    model = accelerated(mixed_precision="bf16").prepare(adapter.transformer)
    policies = CopiedPolicies(adapter, old=True, reference=True)
    part = nft_loss(adapter, NftConfig(kl=1.0), policies)(model, forward_batch(adapter))

    assert (part.metrics["kl"], part.metrics["old_deviation"]) == (0.0, 0.0)


def test_an_average_of_diffusers_keeps_the_trained_adapters_and_leaves_the_old_ones():
    adapter = frozen()
    add_lora(adapter)
    policies = LoraPolicies(adapter)
    trained = [each for each in adapter.transformer.parameters() if each.requires_grad]
    average = EMAModel(trained, decay=0.5, min_decay=0.5)
    for value in (2.0, 4.0):  # the first of which it takes as it is
        with torch.no_grad():
            for weight in trained:
                weight.fill_(value)
        average.step(trained)
    average.copy_to(trained)
    assert all(bool((weight == 3.0).all()) for weight in trained)
    old = policies.weights(old=True)
    assert all(bool((weight.abs() < 1.5).all()) for weight in old.values())
