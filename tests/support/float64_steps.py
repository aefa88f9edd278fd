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
    """A sample: its tokens, which of them are trained, log μ of these, its reward and group."""

    token_ids: Sequence[int]
    trained: Sequence[int]
    behaviour: Sequence[float]
    reward: float
    group: str


@dataclass(frozen=True)
class Scored:
    """What the model says of a sample's trained tokens, in order."""

    given: Given
    logprobs: Tensor
    values: Tensor
    behaviour: Tensor
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
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
    values = out.hidden_states[-1][0, places] @ head[0]
    return Scored(sample, logprobs, values, torch.tensor(sample.behaviour, dtype=torch.float64))


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


TOKEN_LOSSES: dict[str, Callable[[Scored], Tensor]] = {
    "grpo": _clip,
    "dapo": _clip,
    "gspo": _gspo,
    "cispo": _capped,
    "aipo": _capped,
    "sapo": _sapo,
}
OF_SEQUENCES = ("grpo", "gspo", "sapo")


def step_loss(kind: str, samples: Sequence[Scored]) -> Tensor:
    """Return the loss of a step, the mean over its samples, or over its tokens."""
    if kind == "ppo":
        return _ppo(samples)
    losses = [TOKEN_LOSSES[kind](one) for one in samples if len(one.logprobs)]
    if kind in OF_SEQUENCES:
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.cat(losses).mean()


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
