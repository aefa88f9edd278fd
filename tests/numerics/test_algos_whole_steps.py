"""A whole step of each algorithm, on the path that runs take, against loops in float64.

Samples are odd on purpose: groups of one and of equal rewards, prompts and answers of one token, an
answer with a tool's words in it and one of nothing else, two samples cut off. Models have what
changes log-probabilities or must not: tied embeddings, soft-capped logits and scores, dropout, and
routers with a loss of their own.
"""

from dataclasses import replace

import pytest
import torch
import transformers
from float64_steps import group_advantages, scored, step_loss
from step_samples import (
    POLICY_VERSION,
    ROWS,
    SIZES,
    TEMPERATURE,
    VOCABULARY,
    exact,
    given_samples,
    step_of,
    trajectory_of,
)
from tiny_models import write_random

import cosmos_app.step_share as app
import cosmos_parallel as parallel
from cosmos_algos import (
    AipoConfig,
    CispoConfig,
    DapoConfig,
    DecoupledPpoConfig,
    GrpoConfig,
    GspoConfig,
    IcePopConfig,
    ImportanceConfig,
    MisConfig,
    ObjectiveConfig,
    OffPolicyMask,
    PpoConfig,
    RatioMask,
    SapoConfig,
    StalenessMask,
    TisConfig,
    WorstTokenMask,
)
from cosmos_app.roles.critic import critic_step

MODELS = {
    "tied": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "soft-capped": lambda: transformers.Gemma2Config(
        **SIZES,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=8,
        sliding_window=4,
    ),
    "dropout": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_head=2,
        n_layer=2,
        n_positions=64,
        attn_pdrop=0.4,
        resid_pdrop=0.4,
        embd_pdrop=0.4,
    ),
    "routed": lambda: transformers.MixtralConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=10.0,
        router_jitter_noise=0.5,
    ),
}
KINDS = {
    "grpo": GrpoConfig,
    "dapo": DapoConfig,
    "gspo": GspoConfig,
    "cispo": CispoConfig,
    "aipo": AipoConfig,
    "sapo": SapoConfig,
    "ppo": PpoConfig,
}
CORRECTIONS = {
    "importance-sequence": ImportanceConfig(level="sequence"),
    "tis-sequence": TisConfig(floor=0.5, cap=1.5, level="sequence"),
    "tis-geometric": TisConfig(floor=0.9, cap=1.2, level="geometric"),
    "icepop": IcePopConfig(low=0.5, high=2.0),
    "mis-sequence": MisConfig(),
    "mis-geometric": MisConfig(low=0.8, high=1.3, level="geometric"),
}
REJECTIONS = (
    StalenessMask(max_lag=0),
    WorstTokenMask(low=0.1, high=5.0),
    RatioMask(low=0.6, high=1.5),
    OffPolicyMask(bound=0.1),
)
PARTS = {
    "decoupled_ppo": DecoupledPpoConfig(temperature=TEMPERATURE),
    **{
        name: GrpoConfig(temperature=TEMPERATURE, objective=ObjectiveConfig(correction=correction))
        for name, correction in CORRECTIONS.items()
    },
    "rejections": GrpoConfig(
        temperature=TEMPERATURE, objective=ObjectiveConfig(rejections=REJECTIONS)
    ),
    "entropy": GrpoConfig(
        temperature=TEMPERATURE, objective=ObjectiveConfig(entropy_coefficient=0.2)
    ),
    "positive": PpoConfig(temperature=TEMPERATURE, imitation_coefficient=0.3),
}


def updates(path, algorithm, samples, head, *, layout: str, mask: bool) -> dict[str, torch.Tensor]:
    """Return minus the gradient of a step, which plain descent at a rate of 1 adds to weights."""
    mesh = parallel.build_mesh(parallel.ParallelConfig())
    held = parallel.ModelConfig(value_head=algorithm.critic is not None)
    model = parallel.load_causal_lm(path, mesh, held)
    if held.value_head:
        with torch.no_grad():
            model.value_head.weight.copy_(head)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    descent = parallel.SgdConfig(lr=1.0)
    config = parallel.LearnerConfig(optimizer=descent, max_grad_norm=float("inf"))
    learner = parallel.Learner(model, config)
    trajectories = [trajectory_of(number, sample) for number, sample in enumerate(samples)]
    train, plan = step_of(trajectories), app.BatchPlan(layout=layout, max_tokens=24)
    batches = []
    for index in range(2):  # as two ranks would have them
        share = app.share_of_step(train, algorithm, index=index, num_shares=2, mask_truncated=mask)
        mine = [trajectories[int(ref.key)] for ref in share.refs]
        batches += app.batches_of_share(share, mine, plan, policy_version=POLICY_VERSION)
    assert len(batches) > 2
    if algorithm.critic is None:
        report = learner.step(batches, algorithm.loss)
    else:
        report = critic_step(
            learner, batches, algorithm, value=algorithm.with_critic, loss=algorithm.loss
        )
    assert report.outcome == "updated"
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}, report


def expected(path, kind, samples, head, *, mask: bool):
    """Return the same of a loop."""
    model = exact(path)
    head = head.double().requires_grad_()
    advantages = group_advantages(samples)
    kept = []
    for number, sample in enumerate(samples):
        if mask and ROWS[number][-1]:
            continue
        one = scored(model, head, sample, TEMPERATURE)
        kept.append(replace(one, advantage=advantages[number]))
    loss = step_loss(kind, kept)
    loss.backward()
    found = {n: -p.grad for n, p in model.named_parameters() if p.grad is not None}
    if head.grad is not None:
        found["value_head.weight"] = -head.grad
    return found, loss.item()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        write_random(config(), folder / name)
    return folder


def assert_same(path, kind, algorithm, samples, head, *, layout: str, mask: bool) -> None:
    """Compare loss and gradients of a step with those of a loop."""
    loop, loss = expected(path, kind, samples, head, mask=mask)
    mine, report = updates(path, algorithm, samples, head, layout=layout, mask=mask)
    assert report.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert loop.keys() <= mine.keys()
    largest = max(float(g.abs().max()) for g in loop.values())
    for name, value in mine.items():
        target = loop.get(name, torch.zeros_like(value)).float()
        error = float((value - target).abs().max())
        assert error < 2e-4 * largest, f"{layout}, mask {mask}: {name} is off by {error}"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_a_loop_in_float64(written, kind, model):
    torch.manual_seed(1)
    path, head = written / model, torch.randn(1, 16)
    with torch.no_grad():
        samples = given_samples(exact(path), head.double())
    algorithm = KINDS[kind](temperature=TEMPERATURE).build()
    layouts = ("padded",) if model == "dropout" else ("padded", "packed")
    for layout in layouts:
        for mask in (False, True):
            assert_same(path, kind, algorithm, samples, head, layout=layout, mask=mask)


@pytest.mark.parametrize("kind", PARTS)
def test_a_step_with_other_parts_is_that_of_a_loop_in_float64(written, kind):
    torch.manual_seed(1)
    path, head = written / "tied", torch.randn(1, 16)
    with torch.no_grad():
        samples = given_samples(exact(path), head.double())
    algorithm = PARTS[kind].build()
    for layout, mask in (("padded", False), ("packed", True)):
        assert_same(path, kind, algorithm, samples, head, layout=layout, mask=mask)
