"""DiffusionNFT, DDRL and Flow-GRPO from their equations, in float64, a sample and level at a time.

Nothing here is of cosmos_wfm but the adapter that embeds prompts, decodes and encodes. The denoiser
is diffusers' own in float64, called with weights of this loop's: all of them, or what adapters make
of the frozen ones, W + alpha/rank B A. Policies are dictionaries of weights.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.func import functional_call

BETAS = (0.9, 0.999)


def generator(*parts):
    """Return the generator that is a function of these numbers, as docs say a run's are."""
    state = np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def levels(num_steps, shift):
    """Return the noise levels, from 1 to 0."""
    even = [1 - step / num_steps for step in range(num_steps + 1)]
    return [shift * u / (1 + (shift - 1) * u) for u in even]


@dataclass
class Denoiser:
    """v(weights, x, σ, text) of SD3 or Cosmos; without weights, of the model as it was found."""

    embed: object  # the adapter of the run that is compared with
    pipeline: object  # another copy of its pipeline
    scale: float  # alpha / rank; 0 where all weights are trained

    def __post_init__(self):
        self.module = self.pipeline.transformer.double().requires_grad_(False)
        self.base = {name: p.clone() for name, p in self.module.named_parameters()}
        self.is_cosmos = type(self.pipeline).__name__.startswith("Cosmos")

    def whole(self, weights):
        if weights is None or not self.scale:
            return self.base if weights is None else weights
        whole = dict(self.base)
        for name in {name.rsplit(".lora_", 1)[0] for name in weights}:
            product = weights[f"{name}.lora_B"] @ weights[f"{name}.lora_A"]
            whole[f"{name}.weight"] = self.base[f"{name}.weight"] + self.scale * product
        return whole

    def __call__(self, weights, x, sigma, text, given=None):
        named = {k: v.double() if v.is_floating_point() else v for k, v in text.items()}
        named |= {"hidden_states": x, "timestep": torch.tensor([1000 * sigma]).double()}
        if self.is_cosmos:
            factor = self.pipeline.vae_scale_factor_spatial
            mask = torch.zeros(1, 1, *x.shape[2:], dtype=x.dtype)
            named["timestep"] = torch.tensor([sigma]).double()
            if given is not None:
                mask = given.expand_as(mask)
                named["timestep"] = given * 1e-4 + (1 - given) * sigma
            size = [side * factor for side in x.shape[-2:]]
            padding = torch.zeros(1, 1, *size, dtype=x.dtype)
            named |= {"condition_mask": mask, "padding_mask": padding}
        return functional_call(
            self.module, self.whole(weights), (), named | {"return_dict": False}
        )[0]


@dataclass
class Training:
    """Weights, AdamW's moments (Loshchilov and Hutter, algorithm 2), average and reports."""

    weights: dict
    lr: float
    eps: float
    decay: float
    max_norm: float
    average_decay: float
    num: int = 0
    reports: list = field(default_factory=list)

    def __post_init__(self):
        self.weights = {name: w.double().clone() for name, w in self.weights.items()}
        self.average = dict(self.weights)
        self.moments = dict.fromkeys(self.weights, (0.0, 0.0))

    def step(self, loss, gradients):
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        clip, self.num = min(1.0, self.max_norm / (norm + 1e-6)), self.num + 1
        ramp = min(self.average_decay, self.num / (9 + self.num))
        for name, old in self.weights.items():
            g = clip * gradients[name]
            first, second = self.moments[name]
            first = BETAS[0] * first + (1 - BETAS[0]) * g
            second = BETAS[1] * second + (1 - BETAS[1]) * g**2
            self.moments[name] = first, second
            unbiased = first / (1 - BETAS[0] ** self.num), second / (1 - BETAS[1] ** self.num)
            moved = unbiased[0] / (unbiased[1].sqrt() + self.eps)
            self.weights[name] = (old - self.lr * (moved + self.decay * old)).detach()
            self.average[name] = ramp * self.average[name] + (1 - ramp) * self.weights[name]
        self.reports.append({"loss": loss, "norm": norm, "gradients": gradients})


@dataclass
class Loop:
    """What both algorithms share: the recipe's numbers, prompts, and who computes rewards."""

    denoiser: Denoiser
    recipe: object
    prompts: list
    reward: object

    def __post_init__(self):
        config, adapter = self.recipe.sampler, self.denoiser.embed
        self.sigmas = levels(config.num_steps, adapter.shift)
        self.shape = adapter.latent_shape(config.frames, config.height, config.width)
        self.num = self.recipe.groups_per_step * self.recipe.samples_per_group
        self.scale = config.guidance
        self.away = adapter.encode_negative(1) if self.scale else None

    def velocity(self, weights, x, sigma, text):
        """Return v with guidance as pipelines have it; only the prompt's has a gradient."""
        v = self.denoiser(weights, x, sigma, text)
        if self.away is None:
            return v
        with torch.no_grad():
            away = self.denoiser(weights, x, sigma, self.away)
        if self.denoiser.is_cosmos:
            return v + self.scale * (v - away)
        return away + self.scale * (v - away)

    def text(self, step, number):
        group = step * self.recipe.groups_per_step + number // self.recipe.samples_per_group
        return self.denoiser.embed.encode_text([self.prompts[group % len(self.prompts)]])

    def draw(self, source):
        return torch.randn(self.shape, generator=source)[None].double()

    def score(self, x):
        return self.reward(self.denoiser.embed.decode(x.float()), [""])[0]

    def gradients(self, training, losses):
        """Return the sum of losses, each a function of the weights, and its gradients."""
        live = {name: w.clone().requires_grad_() for name, w in training.weights.items()}
        total, sums = 0.0, {name: torch.zeros_like(w) for name, w in live.items()}
        for loss in losses:
            value = loss(live) / len(losses)
            found = torch.autograd.grad(value, list(live.values()), allow_unused=True)
            total += value.item()
            for name, g in zip(live, found, strict=True):
                sums[name] += 0.0 if g is None else g
        return total, sums


def nft(loop, training):
    """Train by DiffusionNFT (arXiv 2509.16117) as its authors do, and return the old policy."""
    recipe, config, old = loop.recipe, loop.recipe.algorithm, dict(training.weights)
    for step in range(recipe.num_steps):
        texts = [loop.text(step, number) for number in range(loop.num)]
        samples = [_ode(loop, old, step, n, text) for n, text in enumerate(texts)]
        r = _optimality(torch.tensor([loop.score(x) for x in samples]).double(), recipe)
        losses = []
        for number, (x0, text) in enumerate(zip(samples, texts, strict=True)):
            source = generator(recipe.seed, step, number, 1)
            order = torch.randperm(len(loop.sigmas) - 1, generator=source)
            for place in range(int(len(order) * config.timestep_fraction)):
                sigma, noise = loop.sigmas[order[place]], loop.draw(source)
                losses.append(_nft_loss(loop, (x0, noise, sigma), text, old, float(r[number])))
        training.step(*loop.gradients(training, losses))
        decay = min(config.decay.rate * (step + 1), config.decay.most)
        old = {k: decay * w + (1 - decay) * training.weights[k] for k, w in old.items()}
    return old


def _ode(loop, policy, step, number, text):
    """Follow dx = v dσ by Adams and Bashforth's second rule."""
    x, before, last = loop.draw(generator(loop.recipe.seed, step, number)), None, 0.0
    with torch.no_grad():
        for now, then in zip(loop.sigmas, loop.sigmas[1:], strict=False):
            v, h = loop.denoiser(policy, x, now, text), then - now
            x = x + h * (v if before is None else v + h / (2 * last) * (v - before))
            before, last = v, h
    return x


def _optimality(rewards, recipe):
    grouped, clip = rewards.view(-1, recipe.samples_per_group), recipe.algorithm.advantage_clip
    centred = (grouped - grouped.mean(1, keepdim=True)).flatten()
    width = rewards.std() + 1e-4
    return 0.5 + (centred / width).clamp(-clip, clip) / (2 * clip)


def _nft_loss(loop, noised, text, old, r):
    config, (x0, noise, sigma) = loop.recipe.algorithm, noised
    x = (1 - sigma) * x0 + sigma * noise
    with torch.no_grad():
        v_old, v_ref = (loop.denoiser(weights, x, sigma, text) for weights in (old, None))

    def error(v):
        difference = x - sigma * v - x0
        return difference.square().mean() / difference.detach().abs().mean()

    def loss(weights):
        v = loop.denoiser(weights, x, sigma, text)
        positive = (1 - config.beta) * v_old + config.beta * v
        negative = (1 + config.beta) * v_old - config.beta * v
        policy = (r * error(positive) + (1 - r) * error(negative)) / config.beta
        return config.advantage_clip * policy + config.kl * (v - v_ref).square().mean()

    return loss


def ddrl(loop, training, data):
    """Train by DDRL (arXiv 2512.04332) over steps of Flow-GRPO's process (arXiv 2505.05470)."""
    recipe, config = loop.recipe, loop.recipe.algorithm
    for step in range(recipe.num_steps):
        texts = [loop.text(step, number) for number in range(loop.num)]
        drawn = [_sde(loop, training.weights, step, n, text) for n, text in enumerate(texts)]
        rewards = torch.tensor([loop.score(x) for x, _ in drawn]).double()
        likely = (-rewards.view(-1, recipe.samples_per_group) / config.beta).exp()
        transformed = -likely / likely.mean(1, keepdim=True)  # λ, as exp(-Z/β) = E exp(-r/β)
        transformed = transformed.clamp(min=-config.policy.advantage_clip)
        advantages = (transformed - transformed.mean(1, keepdim=True)).flatten().tolist()
        losses = []
        for number, (_, steps) in enumerate(drawn):
            sample = data[_place(len(data), step * loop.num + number, recipe.seed)]
            for place, noisy in enumerate(steps):
                source = generator(recipe.seed, step, number, 2, place)
                policy = _step_loss(loop, noisy, texts[number], advantages[number])
                losses.append(_sum(policy, _data_loss(loop, sample, source), config.data_weight))
        training.step(*loop.gradients(training, losses))


def flow_grpo(loop, training):
    """Train by Flow-GRPO (arXiv 2505.05470), guidance a part of the policy."""
    recipe, config = loop.recipe, loop.recipe.algorithm
    for step in range(recipe.num_steps):
        texts = [loop.text(step, number) for number in range(loop.num)]
        drawn = [_sde(loop, training.weights, step, n, text) for n, text in enumerate(texts)]
        rewards = torch.tensor([loop.score(x) for x, _ in drawn]).double()
        grouped = rewards.view(-1, recipe.samples_per_group)
        scores = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        clip = config.advantage_clip
        advantages = scores.clamp(-clip, clip).flatten().tolist()
        losses = [
            _step_loss(loop, noisy, text, advantage)
            for (_, steps), text, advantage in zip(drawn, texts, advantages, strict=True)
            for noisy in steps
        ]
        training.step(*loop.gradients(training, losses))


def _sde(loop, policy, step, number, text):
    """Return a sample, and of each noisy step (σ, σ', s, x, x', log-probability)."""
    source, sde, steps = generator(loop.recipe.seed, step, number), _policy(loop).sde, []
    x, end = loop.draw(source), sde.first + sde.num_noisy if sde.num_noisy else math.inf
    with torch.no_grad():
        for place, (now, then) in enumerate(zip(loop.sigmas, loop.sigmas[1:], strict=False)):
            capped = min(now, loop.sigmas[1])
            flow = math.sqrt(capped / (1 - capped)) if sde.kind == "flow" else 1.0
            s = sde.eta * flow if then and sde.first <= place < end else 0.0
            mean = _mean(x, loop.velocity(policy, x, now, text), now, then, s)
            if s:
                following = mean + s * math.sqrt(now - then) * loop.draw(source)
                steps.append((now, then, s, x, following, _log_prob(following, mean, now, then, s)))
            x = following if s else mean
    return x, steps


def _policy(loop):
    """Return the settings of noisy steps, which are a part of DDRL's."""
    return getattr(loop.recipe.algorithm, "policy", loop.recipe.algorithm)


def _mean(x, v, now, then, s):
    return x + (v + s**2 / (2 * now) * (x + (1 - now) * v)) * (then - now)


def _log_prob(following, mean, now, then, s):
    variance = s**2 * (now - then)
    return -((following - mean) ** 2 / variance + math.log(2 * math.pi * variance)).mean() / 2


def _step_loss(loop, noisy, text, advantage):
    config, (now, then, s, x, following, drawn) = _policy(loop), noisy
    with torch.no_grad():
        reference = _mean(x, loop.velocity(None, x, now, text), now, then, s)

    def loss(weights):
        mean = _mean(x, loop.velocity(weights, x, now, text), now, then, s)
        ratio = (_log_prob(following, mean, now, then, s) - drawn).exp()
        cut = ratio.clamp(1 - config.clip, 1 + config.clip)
        kl = (mean - reference).square().mean() / (2 * s**2 * (now - then))
        return torch.maximum(-advantage * ratio, -advantage * cut) + config.kl * kl

    return loss


def _data_loss(loop, sample, source):
    """Return the flow-matching loss at a level of the logit-normal density, shifted."""
    embed = loop.denoiser.embed
    dropped = torch.rand((), generator=source).item() < 0.1
    u = torch.sigmoid(torch.randn(1, generator=source)).item()
    sigma, noise = embed.shift * u / (1 + (embed.shift - 1) * u), loop.draw(source)
    x0 = embed.encode_pixels(sample.pixels[None]).double()
    made, given = torch.ones(1), None
    if embed.max_given_frames:
        num = int(torch.randint(embed.max_given_frames + 1, (), generator=source))
        first = torch.arange(x0.shape[2]) < min(num, x0.shape[2] - 1)
        given = first.double().view(1, 1, -1, 1, 1)
        made = 1 - given
    text = embed.encode_dropped(1) if dropped else embed.encode_text([sample.prompt])
    x = x0 + made * sigma * (noise - x0)

    def loss(weights):
        error = loop.denoiser(weights, x, sigma, text, given) - (noise - x0)
        return (made * error).square().mean()

    return loss


def _sum(policy, data, weight):
    return lambda weights: policy(weights) + weight * data(weights)


def _place(num, position, seed):
    return int(np.random.default_rng((seed, position // num)).permutation(num)[position % num])
