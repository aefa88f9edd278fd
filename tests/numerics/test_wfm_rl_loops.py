"""Runs of DiffusionNFT, DDRL and Flow-GRPO against loops in float64, written from the equations.

Losses, gradients of all parameters, parameters, the old policy and the average, over three steps.
"""

import pytest
import torch
from float64_rl import Denoiser, Loop, Training, ddrl, flow_grpo, nft

from cosmos_parallel import AdamWConfig, EmaConfig, LearnerConfig
from cosmos_wfm import (
    DdrlConfig,
    DiffusionRl,
    DiffusionRlConfig,
    FlowGrpoConfig,
    FullTuning,
    LoraTuning,
    MockCaptionsConfig,
    NftConfig,
    OldPolicyDecay,
    SamplerConfig,
    SdeConfig,
    load_adapter,
    save_pipeline,
    tiny_cosmos_pipeline,
    tiny_sd3_pipeline,
)

PROMPTS = ["a red square", "a blue square", "a green disc"]
MODELS = {"sd3": (tiny_sd3_pipeline, 1, 16), "cosmos": (tiny_cosmos_pipeline, 5, 32)}
LORA = LoraTuning(rank=2, alpha=4)
NFT = NftConfig(
    beta=0.5,
    kl=0.1,
    advantage_clip=1.0,  # below 1.2, the largest of these
    timestep_fraction=0.7,
    decay=OldPolicyDecay(rate=0.2),
)
DDRL = DdrlConfig(
    beta=0.1, data_weight=0.5, policy=FlowGrpoConfig(clip=0.1, kl=0.05, advantage_clip=1.5)
)
GUIDED = FlowGrpoConfig(clip=0.1, kl=0.05, advantage_clip=0.9)  # below 1.15, the largest
WINDOW = FlowGrpoConfig(clip=0.1, kl=0.05, sde=SdeConfig(kind="dance", eta=0.3, num_noisy=1))
# A large eps: else Adam makes steps of 1 out of gradients that are rounding.
LEARNER = LearnerConfig(
    optimizer=AdamWConfig(lr=2e-3, eps=1e-3, weight_decay=0.1),
    max_grad_norm=0.2,
    ema=EmaConfig(decay=0.3),
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def reward(pixels, prompts):
    return (20 * pixels.flatten(1)[:, ::3].mean(1)).tolist()


def make_run(tmp_path, family, algorithm, tuning):
    """Return a run over micro-batches of two of its three samples a group."""
    build, frames, size = MODELS[family]
    torch.manual_seed(0)
    save_pipeline(build(num_layers=1), tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    sizes = {"frames": frames, "height": size, "width": size}
    data = MockCaptionsConfig(num_samples=4, **sizes) if algorithm is DDRL else None
    recipe = DiffusionRlConfig(
        model=str(tmp_path / "model"),
        prompts=str(tmp_path / "prompts.txt"),
        prompt_order="file",  # the loops' own
        output=str(tmp_path / "out"),
        rewards={},
        num_steps=3,
        groups_per_step=1,
        samples_per_group=3,
        micro_batch_size=2,
        seed=5,
        data=data,
        sampler=SamplerConfig(
            num_steps=3, guidance=3.0 if isinstance(algorithm, FlowGrpoConfig) else 0.0, **sizes
        ),
        algorithm=algorithm,
        tuning=tuning,
        learner=LEARNER,
    )
    return DiffusionRl(recipe, scorer=reward)


def plain(named):
    """Return tensors by the names that the loops have for them, without those of other adapters."""
    named = {name: tensor.detach() for name, tensor in named.items()}
    adapters = {name: t for name, t in named.items() if ".lora_" in name}
    return {name.replace(".default.weight", ""): t for name, t in (adapters or named).items()}


def trained(run):
    parameters = run.adapter.transformer.named_parameters()
    return plain({name: p for name, p in parameters if p.requires_grad})


def gradients_of(run, into):
    """Keep the gradients of each step, clipped as the optimizer has them."""

    def keep(optimizer, arguments, named):
        parameters = run.adapter.transformer.named_parameters()
        into.append(plain({n: p.grad.clone() for n, p in parameters if p.grad is not None}))

    run.learner.optimizer.register_step_pre_hook(keep)


def furthest(found, wanted):
    assert found.keys() == wanted.keys()
    return max((found[name] - value).abs().max().item() for name, value in wanted.items())


@pytest.mark.parametrize(
    ("family", "algorithm", "tuning"),
    [
        ("sd3", NFT, LORA),
        ("cosmos", NFT, FullTuning()),
        ("sd3", DDRL, FullTuning()),
        ("cosmos", DDRL, LORA),
        ("sd3", GUIDED, LORA),
        ("cosmos", WINDOW, FullTuning()),
    ],
    ids=[
        "nft-sd3-lora",
        "nft-cosmos-full",
        "ddrl-sd3-full",
        "ddrl-cosmos-lora",
        "flow-grpo-sd3-lora",
        "flow-grpo-cosmos-full",
    ],
)
def test_a_run_is_the_loop_in_float64(tmp_path, family, algorithm, tuning):
    run = make_run(tmp_path, family, algorithm, tuning)
    recipe, gradients = run.config, []
    gradients_of(run, gradients)
    scale = tuning.alpha / tuning.rank if tuning is LORA else 0.0
    denoiser = Denoiser(run.adapter, load_adapter(recipe.model).pipeline, scale)
    loop = Loop(denoiser, recipe, PROMPTS, reward)
    adam = LEARNER.optimizer
    training = Training(
        trained(run), adam.lr, adam.eps, adam.weight_decay, LEARNER.max_grad_norm, 0.3
    )

    old = None
    match algorithm:
        case NftConfig():
            old = nft(loop, training)
        case DdrlConfig():
            ddrl(loop, training, recipe.data.build())
        case FlowGrpoConfig():
            flow_grpo(loop, training)

    for step, wanted in enumerate(training.reports):
        report, _ = run.step(step)
        assert report.loss == pytest.approx(wanted["loss"], abs=1e-6)
        assert report.grad_norm == pytest.approx(wanted["norm"], rel=1e-5)
        clip = min(1.0, LEARNER.max_grad_norm / (wanted["norm"] + 1e-6))
        most = max(g.abs().max().item() for g in wanted["gradients"].values())
        scaled = {name: clip * g for name, g in wanted["gradients"].items() if g.any()}
        assert furthest({n: gradients[step][n] for n in scaled}, scaled) < 1e-5 * clip * most
    assert furthest(trained(run), training.weights) < 1e-6
    assert furthest(plain(run.learner.ema.averages), training.average) < 1e-6
    if old is not None:
        kept = {name: weight.clone() for name, weight in run.policies.weights(old=True).items()}
        assert furthest(plain(kept), old) < 1e-6
