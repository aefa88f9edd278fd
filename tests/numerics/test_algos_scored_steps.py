"""Steps with a reference, a teacher or a critic, as runs take them, against loops in float64.

Each algorithm takes several updates on the odd samples of ``step_samples``: what a reference
or teacher says is of another model than the policy, and ratios and values of later updates of PPO
are clipped at those of the first.
"""

from dataclasses import replace

import pytest
import torch
import transformers
from float64_steps import Given, Scored, group_advantages, scored, truncated_weights
from step_samples import (
    POLICY_VERSION,
    SIZES,
    TEMPERATURE,
    exact,
    given_samples,
    step_of,
    trajectory_of,
)
from tiny_models import write_random

import cosmos_app.step_share as app
import cosmos_parallel as parallel
from cosmos_algos import (
    CriticConfig,
    GaeConfig,
    GrpoConfig,
    KlConfig,
    ObjectiveConfig,
    OnPolicyDistillationConfig,
    PpoConfig,
    ReinforcePlusPlusConfig,
)
from cosmos_app.roles.critic import critic_step
from cosmos_app.token_scorers import scorers_of

UPDATES = 3
PENALTY, DISCOUNT, TEACHING, TOP_K = 0.3, 0.9, 0.4, 4
GAMMA, DECAY, CLIP, CRITIC = 0.9, 0.8, 0.1, 0.5


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a policy, and another model that is its reference or teacher."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "other")):
        write_random(transformers.Qwen3Config(**SIZES), folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def samples(written):
    with torch.no_grad():
        return given_samples(exact(written / "policy"), torch.zeros(1, 16, dtype=torch.float64))


def beginning_head():
    return torch.randn(1, 16, generator=torch.Generator().manual_seed(2))


def trained(written, samples, algorithm, lr, max_tokens, *, needs):
    """Return what each update of a run reports, and the weights after the last."""
    mesh = parallel.build_mesh(parallel.ParallelConfig())
    held = parallel.ModelConfig(value_head=algorithm.critic is not None)
    model = parallel.load_causal_lm(written / "policy", mesh, held)
    other = parallel.load_causal_lm(written / "other", mesh).requires_grad_(False)
    if held.value_head:
        with torch.no_grad():
            model.value_head.weight.copy_(beginning_head())
    optimizer = parallel.SgdConfig(lr=lr)
    config = parallel.LearnerConfig(optimizer=optimizer, max_grad_norm=float("inf"))
    learner = parallel.Learner(model, config)
    scorers = scorers_of(
        algorithm,
        other if needs == "reference" else None,
        other if needs == "teacher" else None,
    )
    trajectories = [trajectory_of(number, sample) for number, sample in enumerate(samples)]
    train, plan = step_of(trajectories), app.BatchPlan(layout="padded", max_tokens=max_tokens)
    share = app.share_of_step(train, algorithm, index=0, num_shares=1, mask_truncated=False)
    mine = [trajectories[int(ref.key)] for ref in share.refs]
    batches = app.batches_of_share(share, mine, plan, policy_version=POLICY_VERSION)
    if not algorithm.scores_first:
        reports = [learner.step(batches, algorithm.loss, scorers=scorers) for _ in range(UPDATES)]
    else:
        value, loss = algorithm.with_token_advantages, algorithm.loss
        reports = [
            critic_step(learner, batches, algorithm, value=value, loss=loss, scorers=scorers)
            for _ in range(UPDATES // algorithm.epochs)
        ]
    assert all(report.outcome == "updated" for report in reports)
    return reports, dict(model.named_parameters())


def assert_same(weights, found, begun):
    moved = max(float((w - begun[n]).abs().max()) for n, w in weights.items())
    assert found.keys() <= weights.keys()
    for name, value in found.items():
        error = float((value.detach() - weights[name]).abs().max())
        assert error < 5e-4 * moved, f"{name} is off by {error} of {moved}"


def assert_told(report, loss, divergences):
    assert report.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    whole = torch.cat(divergences).mean().item()
    assert report.mean("kl", over="tokens") == pytest.approx(whole, rel=1e-4, abs=1e-6)


def of_model(path):
    """Return a policy with its head, and all weights by name as they are and as they began."""
    model, head = exact(path), beginning_head().double().requires_grad_()
    named = {**dict(model.named_parameters()), "value_head.weight": head}
    return model, head, named, {name: w.detach().clone() for name, w in named.items()}


def descend(named, lr):
    with torch.no_grad():
        for weight in named.values():
            if weight.grad is not None:
                weight -= lr * weight.grad
            weight.grad = None


def estimate(estimator: str, delta):
    """Schulman, "Approximating KL divergence": k1, k2, k3 of log π - log π_ref."""
    return {"k1": delta, "k2": delta**2 / 2, "k3": (-delta).exp() - 1 + delta}[estimator]


def to_go(values, discount):
    found, following = [], 0.0
    for value in reversed(values.tolist()):
        following = value + discount * following
        found.append(following)
    return torch.tensor(found[::-1], dtype=torch.float64)


def penalised(one: Scored, reference: Scored, estimator: str, place: str):
    """Return the token losses of a policy gradient with a penalty, and the divergence."""
    ratios = (one.logprobs - one.logprobs.detach()).exp()
    weights = truncated_weights(one)
    delta = one.logprobs - reference.logprobs.detach()
    values = estimate(estimator, delta)
    advantage = torch.full_like(weights, one.advantage)
    if place == "reward":
        advantage = advantage - PENALTY * to_go(values.detach(), DISCOUNT)
        # what depends on the policy beyond the sampling keeps its own gradient; k1's is nothing
        penalty = weights * values if estimator == "k3" else torch.zeros_like(values)
    else:
        penalty = weights * values * (1.0 if estimator == "k2" else ratios)
    losses = -weights * advantage * ratios + PENALTY * penalty
    return losses, (weights * values).detach()


def taught(one: Scored, teacher: Scored, logits, goals, beta: float | None):
    """Return the token losses of distillation: the teacher in advantages, or its likeliest."""
    ratios, weights = (one.logprobs - one.logprobs.detach()).exp(), truncated_weights(one)
    if beta is None:
        gap = (teacher.logprobs - one.logprobs).detach()
        return -weights * TEACHING * gap * ratios, torch.zeros_like(gap)
    found = []
    for mine, theirs in zip(logits, goals, strict=True):
        ours, wanted = (torch.softmax(x / TEMPERATURE, -1) for x in (mine, theirs.detach()))
        few = wanted.topk(TOP_K).indices
        ours, wanted = (torch.cat([p[few], 1 - p[few].sum()[None]]) for p in (ours, wanted))
        if beta in (0.0, 1.0):
            p, q = (ours, wanted) if beta else (wanted, ours)
            found.append((p * (p / q).log()).sum())
        else:
            mixed = beta * wanted + (1 - beta) * ours
            first = beta * (wanted * (wanted / mixed).log()).sum()
            found.append(first + (1 - beta) * (ours * (ours / mixed).log()).sum())
    divergence = torch.stack(found)
    return weights * TEACHING * divergence, divergence.detach()


def logits_of(model, sample: Given):
    ids = torch.tensor([list(sample.token_ids)])
    places = torch.tensor(list(sample.trained), dtype=torch.long) - 1
    return model(input_ids=ids, use_cache=False).logits[0, places]


@pytest.mark.parametrize("max_tokens", [16, 64])
@pytest.mark.parametrize(
    ("estimator", "place"),
    [("k1", "loss"), ("k2", "loss"), ("k3", "loss"), ("k1", "reward"), ("k3", "reward")],
)
def test_updates_with_a_penalty_are_those_of_a_loop(written, samples, estimator, place, max_tokens):
    lr, kl = 0.02, KlConfig(coefficient=PENALTY, estimator=estimator, place=place)
    kl = replace(kl, discount=DISCOUNT if place == "reward" else 1.0)
    objective = ObjectiveConfig(kl=kl)
    algorithm = GrpoConfig(temperature=TEMPERATURE, objective=objective).build()
    reports, found = trained(written, samples, algorithm, lr, max_tokens, needs="reference")
    model, head, named, begun = of_model(written / "policy")
    other, advantages = exact(written / "other"), group_advantages(samples)
    kept = [number for number, sample in enumerate(samples) if len(sample.trained)]
    for report in reports:
        losses, divergences = [], []
        for number in kept:
            one = scored(model, head, samples[number], TEMPERATURE)
            reference = scored(other, head, samples[number], TEMPERATURE)
            one = replace(one, advantage=advantages[number])
            tokens, divergence = penalised(one, reference, estimator, place)
            losses.append(tokens.mean())
            divergences.append(divergence)
        loss = torch.stack(losses).mean()
        loss.backward()
        descend(named, lr)
        assert_told(report, loss, divergences)
    assert_same({n: w.detach() for n, w in named.items()}, found, begun)


@pytest.mark.parametrize("max_tokens", [16, 64])
@pytest.mark.parametrize("beta", [None, 0.0, 0.3, 1.0])
def test_updates_towards_a_teacher_are_those_of_a_loop(written, samples, beta, max_tokens):
    lr, objective = 0.05, ObjectiveConfig(teacher_coefficient=TEACHING)
    more = {} if beta is None else {"top_k": TOP_K, "beta": beta}
    config = OnPolicyDistillationConfig(temperature=TEMPERATURE, objective=objective, **more)
    reports, found = trained(written, samples, config.build(), lr, max_tokens, needs="teacher")
    model, head, named, begun = of_model(written / "policy")
    other = exact(written / "other")
    for report in reports:
        losses, divergences = [], []
        for sample in samples:
            if not len(sample.trained):
                continue
            one, teacher = (scored(m, head, sample, TEMPERATURE) for m in (model, other))
            logits, goals = logits_of(model, sample), logits_of(other, sample)
            tokens, divergence = taught(one, teacher, logits, goals, beta)
            losses.append(tokens)
            divergences.append(divergence)
        loss = torch.cat(losses).mean()
        loss.backward()
        descend(named, lr)
        assert report.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        if beta is not None:
            whole = torch.cat(divergences).mean().item()
            assert report.mean("divergence", over="tokens") == pytest.approx(whole, rel=1e-4)
    assert_same({n: w.detach() for n, w in named.items()}, found, begun)


def estimated(rewards, values):
    """Return advantages by GAE (arXiv 1506.02438, eq. 16)."""
    found, carried, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carried = reward + GAMMA * following - value + GAMMA * DECAY * carried
        following = value
        found.append(carried)
    return torch.tensor(found[::-1], dtype=torch.float64)


def valued(model, head, other, kept, penalty: float):
    """Return each sample's first scores with its whitened advantages, and its returns."""
    first, advantages = [], []
    for sample in kept:
        one, reference = (scored(m, head, sample, TEMPERATURE) for m in (model, other))
        costs = (penalty * (one.logprobs - reference.logprobs)).tolist()
        rewards = [-cost for cost in costs]
        rewards[-1] += sample.reward
        first.append(replace(one, logprobs=one.logprobs.detach(), values=one.values.detach()))
        advantages.append(estimated(rewards, one.values.tolist()))
    whole = torch.cat(advantages)
    returns = [a + one.values for a, one in zip(advantages, first, strict=True)]
    spread = (whole.var() + 1e-8).sqrt()
    return first, [(a - whole.mean()) / spread for a in advantages], returns


def whitened_returns(ones, references, baseline: bool):
    """Return A_t = R - β Σ γ^(s-t) k1_s, or with R less its group's mean, whitened over tokens."""
    found = []
    for (one, mean), reference in zip(ones, references, strict=True):
        k1 = (one.logprobs - reference.logprobs).detach()
        reward = one.given.reward - (mean if baseline else 0.0)
        found.append(reward - PENALTY * to_go(k1, DISCOUNT))
    whole = torch.cat(found)
    return [(a - whole.mean()) / (whole.var() + 1e-8).sqrt() for a in found]


@pytest.mark.parametrize("max_tokens", [16, 64])
@pytest.mark.parametrize("advantage", ["reinforce_pp", "reinforce_pp_baseline"])
def test_updates_by_whitened_returns_are_those_of_a_loop(written, samples, advantage, max_tokens):
    # REINFORCE++ (arXiv 2501.03262): the penalty is part of what is whitened
    lr, kl = 0.02, KlConfig(coefficient=PENALTY, estimator="k1", place="reward", discount=DISCOUNT)
    config = ReinforcePlusPlusConfig(
        temperature=TEMPERATURE, advantage=advantage, objective=ObjectiveConfig(kl=kl)
    )
    reports, found = trained(written, samples, config.build(), lr, max_tokens, needs="reference")
    model, head, named, begun = of_model(written / "policy")
    other, groups = exact(written / "other"), {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample.reward)
    kept = [sample for sample in samples if len(sample.trained)]
    assert len(reports) == UPDATES
    for report in reports:
        ones = [scored(model, head, sample, TEMPERATURE) for sample in kept]
        references = [scored(other, head, sample, TEMPERATURE) for sample in kept]
        means = [sum(groups[s.group]) / len(groups[s.group]) for s in kept]
        paired = list(zip(ones, means, strict=True))
        advantages = whitened_returns(paired, references, advantage.endswith("baseline"))
        losses, divergences = [], []
        for one, reference, mine in zip(ones, references, advantages, strict=True):
            ratios = (one.logprobs - one.logprobs.detach()).exp()
            losses.append(-truncated_weights(one) * mine * ratios)
            divergences.append((one.logprobs - reference.logprobs).detach())
        loss = torch.cat(losses).mean()
        loss.backward()
        descend(named, lr)
        assert_told(report, loss, divergences)
    assert_same({n: w.detach() for n, w in named.items()}, found, begun)


def clipped_losses(one: Scored, old: Scored, advantage, returns):
    """Return the losses of policy and critic (arXiv 1707.06347, eq. 7; 2005.12729, section 3)."""
    ratios = (one.logprobs - old.logprobs).exp()
    held = ratios.clamp(0.8, 1.2)
    policy = -truncated_weights(old) * torch.minimum(ratios * advantage, held * advantage)
    near = old.values + (one.values - old.values).clamp(-CLIP, CLIP)
    critic = 0.5 * torch.maximum((one.values - returns) ** 2, (near - returns) ** 2)
    return policy, critic, ((one.values - old.values).abs() > CLIP).double().detach()


@pytest.mark.parametrize("max_tokens", [16, 64])
@pytest.mark.parametrize("penalty", [0.0, PENALTY])
def test_updates_of_a_policy_with_a_critic_are_those_of_a_loop(
    written, samples, penalty, max_tokens
):
    lr = 0.002
    gae = GaeConfig(discount=GAMMA, decay=DECAY)
    kl = KlConfig(coefficient=penalty, estimator="k1", place="reward")
    config = PpoConfig(
        temperature=TEMPERATURE,
        objective=ObjectiveConfig(kl=kl),
        critic=CriticConfig(gae=gae, clip=CLIP, coefficient=CRITIC),
        epochs=UPDATES,
    )
    needs = "reference" if penalty else ""
    (report,), found = trained(written, samples, config.build(), lr, max_tokens, needs=needs)
    model, head, named, begun = of_model(written / "policy")
    kept = [sample for sample in samples if len(sample.trained)]
    with torch.no_grad():
        first, advantages, returns = valued(model, head, exact(written / "other"), kept, penalty)
    for update in range(UPDATES):
        parts = [
            clipped_losses(scored(model, head, sample, TEMPERATURE), *beside)
            for sample, *beside in zip(kept, first, advantages, returns, strict=True)
        ]
        policy, critic, beyond = (torch.cat(tokens) for tokens in zip(*parts, strict=True))
        loss = policy.mean() + CRITIC * critic.mean()
        loss.backward()
        descend(named, lr)
        if not update:
            assert report.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    share = beyond.mean().item()
    assert 0 < share < 1
    assert report.mean("critic/clipped", over="tokens") == pytest.approx(share, abs=1e-9)
    assert_same({n: w.detach() for n, w in named.items()}, found, begun)
