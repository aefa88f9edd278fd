"""A whole step of each algorithm, on the path that runs take, against loops in float64.

Samples are odd on purpose: groups of one and of equal rewards, prompts and answers of one token, an
answer with a tool's words in it and one of nothing else, two samples cut off. Models have what
changes log-probabilities or must not: tied embeddings, soft-capped logits and scores, dropout, and
routers with a loss of their own.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from float64_steps import Given, group_advantages, scored, step_loss
from tiny_models import write_random

import cosmos_app.step_share as app
import cosmos_parallel as parallel
from cosmos_algos import (
    AipoConfig,
    CispoConfig,
    DapoConfig,
    GrpoConfig,
    GspoConfig,
    PpoConfig,
    SapoConfig,
)
from cosmos_app.roles.critic import critic_step
from cosmos_core.messages import SampleRef, Train
from cosmos_core.trajectory import Trajectory, VersionSpan

VOCABULARY = 31
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
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
TEMPERATURE = 0.7
# group, reward, tokens, first trained, tokens of a tool's, cut off
ROWS = (
    ("a", 1.0, 9, 3, (), False),
    ("a", 0.0, 5, 3, (), False),
    ("a", 0.5, 4, 3, (), False),  # an answer of one token
    ("a", 0.25, 12, 3, (5, 6, 7), False),
    ("a", 2.0, 8, 3, range(3, 8), False),  # nothing but a tool's words
    ("a", 0.75, 11, 3, (), True),
    ("b", 1.0, 6, 1, (), False),  # a prompt of one token, and a group of one
    ("c", 1.0, 7, 2, (), False),  # a group of equal rewards
    ("c", 1.0, 3, 2, (), False),
    ("d", 1.0, 4, 1, (), False),
    ("d", 0.0, 2, 1, (), False),
    ("d", 3.0, 10, 1, (), True),
)


def given_samples(model, head) -> list[Given]:
    """Return the samples with log-probabilities of another policy than the model."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for group, reward, length, begin, of_tool, _ in ROWS:
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        trained = [place for place in range(begin, length) if place not in of_tool]
        sample = Given(ids, trained, [0.0] * len(trained), reward, group)
        logprobs = scored(model, head, sample, TEMPERATURE).logprobs.detach()
        moved = logprobs + 0.8 * torch.randn(len(trained), generator=generator)
        samples.append(replace(sample, behaviour=moved.float().tolist()))
    return samples


def exact(path):
    """Return transformers' own model in float64; only its eager attention caps scores."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return load(path, dtype=torch.float64, **how).eval()


def trajectory_of(number: int, sample: Given) -> Trajectory:
    size = len(sample.token_ids)
    logprobs, trainable = np.zeros(size, np.float32), np.zeros(size, np.bool_)
    trainable[list(sample.trained)] = True
    logprobs[list(sample.trained)] = sample.behaviour
    return Trajectory(
        prompt_id="p",
        group=sample.group,
        sibling=number,
        attempt=0,
        token_ids=np.array(sample.token_ids, np.int32),
        logprobs=logprobs,
        trainable=trainable,
        versions=(VersionSpan(0, size),),
        rewards={},
        reward=sample.reward,
        finish_reason="length" if ROWS[number][-1] else "stop",
    )


def step_of(trajectories) -> Train:
    groups: dict[str, list[SampleRef]] = {}
    for number, trajectory in enumerate(trajectories):
        ref = SampleRef(
            sibling=number,
            status="completed",
            key=str(number),
            num_tokens=trajectory.num_trainable,
            length=trajectory.num_tokens,
            reward=trajectory.reward,
            truncated=trajectory.finish_reason == "length",
        )
        groups.setdefault(trajectory.group, []).append(ref)
    return Train(step=1, groups=tuple(map(tuple, groups.values())), publish=False)


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
        batches += app.batches_of_share(share, mine, plan, policy_version=1)
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
            loop, loss = expected(path, kind, samples, head, mask=mask)
            mine, report = updates(path, algorithm, samples, head, layout=layout, mask=mask)
            assert report.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
            assert loop.keys() <= mine.keys()
            largest = max(float(g.abs().max()) for g in loop.values())
            for name, value in mine.items():
                target = loop.get(name, torch.zeros_like(value)).float()
                error = float((value - target).abs().max())
                assert error < 2e-4 * largest, f"{layout}, mask {mask}: {name} is off by {error}"
