"""One step of policy-gradient algorithms from their equations, in float64, one sample at a time.

Nothing here is of cosmos: samples are run alone and without padding through transformers' own
model, log-probabilities are read off its logits, and autograd goes through plain sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Given:
    """A sample: its tokens, which of them are trained, log μ and lag of these, reward and group."""

    token_ids: Sequence[int]
    trained: Sequence[int]
    behaviour: Sequence[float]
    reward: float
    group: str
    lags: Sequence[int] = ()


@dataclass(frozen=True)
class Scored:
    """What the model says of a sample's trained tokens, in order."""

    given: Given
    logprobs: Tensor
    values: Tensor
    behaviour: Tensor
    entropies: Tensor
    advantage: float = 0.0


def group_advantages(samples: Sequence[Given]) -> list[float]:
    """Return (R - mean) / (std + 1e-6) within groups, 0 where nothing differs."""
    found = []
    for sample in samples:
        rewards = torch.tensor(
            [other.reward for other in samples if other.group == sample.group], dtype=torch.float64
        )
        if len(set(rewards.tolist())) < 2:
            found.append(0.0)
        else:
            found.append(float((sample.reward - rewards.mean()) / (rewards.std() + 1e-6)))
    return found


def scored(model: nn.Module, head: Tensor, sample: Given, temperature: float) -> Scored:
    """Run one sample through the model."""
    ids = torch.tensor([list(sample.token_ids)])
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    places = torch.tensor(list(sample.trained), dtype=torch.long) - 1
    logits = out.logits[0, places] / temperature
    targets = ids[0, places + 1]
    every = torch.log_softmax(logits, dim=-1)
    logprobs = every.gather(-1, targets[:, None])[:, 0]
    values = out.hidden_states[-1][0, places] @ head[0]
    behaviour = torch.tensor(sample.behaviour, dtype=torch.float64)
    return Scored(sample, logprobs, values, behaviour, -(every.exp() * every).sum(-1))


def truncated_weights(one: Scored) -> Tensor:
    return (one.logprobs.detach() - one.behaviour).exp().clamp(max=2.0)


def _clip(one: Scored) -> Tensor:
    return -truncated_weights(one) * one.advantage * (one.logprobs - one.logprobs.detach()).exp()


def _gspo(one: Scored) -> Tensor:
    ratio = (one.logprobs - one.logprobs.detach()).mean().exp()
    return -truncated_weights(one) * one.advantage * ratio


def _capped(one: Scored) -> Tensor:
    weights = (one.logprobs.detach() - one.behaviour).exp().clamp(max=5.0)
    return -weights * one.advantage * one.logprobs


def _sapo(one: Scored) -> Tensor:
    gate = 1.0 if one.advantage > 0 else 1.05
    ratios = (one.logprobs - one.logprobs.detach()).exp()
    soft = 4.0 / gate * torch.sigmoid(gate * (ratios - 1.0))
    return -truncated_weights(one) * soft * one.advantage


def _ratios(one: Scored, level: str) -> Tensor:
    """Return ρ = π_old/μ of each token, or of the sample at each of them; π_old is sg(π)."""
    logs = one.logprobs.detach() - one.behaviour
    if level == "sequence":
        logs = logs.sum().expand_as(logs)
    elif level == "geometric":
        logs = logs.mean().expand_as(logs)
    return logs.exp()


def _weighed(weights: Callable[[Scored], Tensor]) -> Callable[[Scored], Tensor]:
    """Return a policy gradient's losses, each times a weight."""

    def losses(one: Scored) -> Tensor:
        return -weights(one) * one.advantage * (one.logprobs - one.logprobs.detach()).exp()

    return losses


def _inside(low: float, high: float, level: str) -> Callable[[Scored], Tensor]:
    def weights(one: Scored) -> Tensor:
        ratios = _ratios(one, level)
        return ratios * ((ratios >= low) & (ratios <= high))

    return weights


def _rejected(one: Scored) -> Tensor:
    """Return truncated weights of tokens of the present version, of samples near enough."""
    ratios, size = _ratios(one, "token"), len(one.logprobs)
    is_fresh = torch.tensor([lag == 0 for lag in one.given.lags])
    is_even = bool((ratios >= 0.1).all() and (ratios <= 5.0).all())
    geometric = float(ratios.prod() ** (1.0 / size))
    moved_away = -float(ratios.log().mean())
    is_kept = is_even and 0.6 <= geometric <= 1.5 and not (one.advantage < 0 < moved_away - 0.1)
    return ratios.clamp(max=2.0) * is_fresh * is_kept


def _decoupled(one: Scored) -> Tensor:
    """AReaL (arXiv 2505.24298, eq. 5), π_prox one version back as in A-3PO (arXiv 2512.06547)."""
    now, proximal = one.logprobs.detach(), []
    for lag, theirs, ours in zip(one.given.lags, one.behaviour, now, strict=True):
        share = 1.0 if lag == 0 else (lag - 1) / lag
        proximal.append(share * ours + (1 - share) * theirs)
    near = torch.stack(proximal)
    weights, ratios = (near - one.behaviour).exp(), (one.logprobs - near).exp()
    free, cut = ratios * one.advantage, ratios.clamp(0.8, 1.2) * one.advantage
    return -weights * (weights <= 5.0) * torch.minimum(free, cut)


def _with_entropy(one: Scored) -> Tensor:
    return _clip(one) - 0.2 * one.entropies


TOKEN_LOSSES: dict[str, Callable[[Scored], Tensor]] = {
    "grpo": _clip,
    "dapo": _clip,
    "gspo": _gspo,
    "cispo": _capped,
    "aipo": _capped,
    "sapo": _sapo,
    "decoupled_ppo": _decoupled,
    "importance-sequence": _weighed(lambda one: _ratios(one, "sequence")),
    "tis-sequence": _weighed(lambda one: _ratios(one, "sequence").clamp(0.5, 1.5)),
    "tis-geometric": _weighed(lambda one: _ratios(one, "geometric").clamp(0.9, 1.2)),
    "icepop": _weighed(_inside(0.5, 2.0, "token")),
    "mis-sequence": _weighed(_inside(0.0, 3.0, "sequence")),
    "mis-geometric": _weighed(_inside(0.8, 1.3, "geometric")),
    "rejections": _weighed(_rejected),
    "entropy": _with_entropy,
}
OF_TOKENS = ("dapo", "cispo", "aipo", "decoupled_ppo")


def step_loss(kind: str, samples: Sequence[Scored]) -> Tensor:
    """Return the loss of a step, the mean over its samples, or over its tokens."""
    if kind == "ppo":
        return _ppo(samples)
    if kind == "positive":
        good = [one.logprobs for one in samples if one.given.reward > 0 and len(one.logprobs)]
        return _ppo(samples) - 0.3 * torch.cat(good).mean()
    losses = [TOKEN_LOSSES[kind](one) for one in samples if len(one.logprobs)]
    if kind in OF_TOKENS:
        return torch.cat(losses).mean()
    return torch.stack([loss.mean() for loss in losses]).mean()


def _ppo(samples: Sequence[Scored], decay: float = 0.95) -> Tensor:
    """Return PPO's first update: advantages by GAE, whitened, and half the critic's loss."""
    kept = [one for one in samples if len(one.logprobs)]
    advantages = []
    for one in kept:
        values = one.values.detach().tolist()
        carried, following, found = 0.0, 0.0, []
        for step in reversed(range(len(values))):
            reward = one.given.reward if step == len(values) - 1 else 0.0
            carried = reward + following - values[step] + decay * carried
            following = values[step]
            found.append(carried)
        advantages.append(torch.tensor(found[::-1], dtype=torch.float64))
    whole = torch.cat(advantages)
    spread = (whole.var() + 1e-8).sqrt()
    policy, critic = [], []
    for one, advantage in zip(kept, advantages, strict=True):
        ratios = (one.logprobs - one.logprobs.detach()).exp()
        policy.append(-truncated_weights(one) * (advantage - whole.mean()) / spread * ratios)
        returns = advantage + one.values.detach()
        critic.append(0.5 * (one.values - returns) ** 2)
    return torch.cat(policy).mean() + 0.5 * torch.cat(critic).mean()
