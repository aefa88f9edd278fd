"""Aggregation weights against the formulas, and their independence of any split."""

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from torch import nn

from cosmos_algos import (
    AggregationConfig,
    AipoConfig,
    AlgorithmConfigError,
    DapoConfig,
    GspoConfig,
    KlConfig,
    LossSum,
    ObjectiveConfig,
    PpoConfig,
    RatioMask,
    ReinforcePlusPlusConfig,
    Share,
    advantage_moments,
    empty_batch,
    sample_weights,
    with_whitened_advantages,
)
from cosmos_core.trajectory import Trajectory, VersionSpan

MODES = ["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"]


@pytest.mark.parametrize(
    ("mode", "token", "denominator"),
    [
        # Samples of 1, 3 and 2 trained tokens; the first two are one group.
        ("token_mean", [1, 1, 1], [1, 3, 2]),
        ("sequence_mean", [1, 1 / 3, 1 / 2], [1, 1, 1]),
        ("sequence_sum", [1, 1, 1], [1, 1, 1]),
        ("constant", [1 / 8, 1 / 8, 1 / 8], [1, 1, 1]),
        ("prompt_mean", [1 / 4, 1 / 4, 1 / 2], [1 / 4, 3 / 4, 1]),
    ],
)
def test_weights_of_a_step(mode, token, denominator):
    weights = sample_weights([1, 3, 2], ["a", "a", "b"], config(mode))

    assert weights.token.tolist() == token
    assert weights.denominator.tolist() == denominator


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_without_trained_tokens_weighs_nothing(mode):
    weights = sample_weights([0, 2], ["a", "b"], config(mode))

    assert weights.token[0] == 0.0
    assert weights.denominator[0] == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 20])
def test_any_split_gives_the_gradient_of_the_whole(mode, num_ranks):
    samples = random_samples(seed=3)
    algorithm = DapoConfig(aggregation=config(mode)).build()
    model = TinyModel().double()
    whole = gradient(model, algorithm, samples, [Share(max_tokens=10_000)])

    shares = [Share(max_tokens=25, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    split = gradient(model, algorithm, samples, shares)

    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)


WHOLE_OBJECTIVES = {
    "penalties": PpoConfig(
        advantage="opo",
        imitation_coefficient=0.3,
        objective=ObjectiveConfig(
            kl=KlConfig(coefficient=0.1, estimator="k3"),
            entropy_coefficient=0.05,
            teacher_coefficient=0.2,
            rejections=(RatioMask(level="sequence", low=0.1, high=10.0),),
        ),
    ),
    "kl_in_reward": DapoConfig(
        objective=ObjectiveConfig(kl=KlConfig(coefficient=0.1, estimator="k1", place="reward"))
    ),
    "kl_whitened": ReinforcePlusPlusConfig(
        objective=ObjectiveConfig(kl=KlConfig(coefficient=0.1, estimator="k1", place="reward"))
    ),
    "gspo": GspoConfig(),
    "aipo": AipoConfig(),
}


@pytest.mark.parametrize("name", WHOLE_OBJECTIVES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_part_of_an_objective_is_independent_of_the_split(name, num_ranks):
    samples = random_samples(seed=5)
    algorithm = WHOLE_OBJECTIVES[name].build()
    model = (TinyModel() if algorithm.critic is None else TinyCritic()).double()
    other = TinyModel(seed=1).double()
    whole = gradient(model, algorithm, samples, [Share(max_tokens=10_000)], other)

    shares = [Share(max_tokens=20, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    split = gradient(model, algorithm, samples, shares, other)

    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-14)
    assert whole.abs().sum() > 0.0


@pytest.mark.parametrize("mode", MODES)
def test_gradient_equals_a_loop_written_from_the_formula(mode):
    samples = random_samples(seed=4)
    algorithm = DapoConfig(
        aggregation=config(mode), objective=ObjectiveConfig(), advantage="dr_grpo"
    ).build()
    model = TinyModel().double()
    step = gradient(model, algorithm, samples, [Share(max_tokens=40)])

    model.zero_grad()
    loop_loss(model, samples, mode).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    # Behaviour log-probs, advantages and weights are float32 in a batch.
    torch.testing.assert_close(step, expected, rtol=2e-6, atol=1e-9)


def test_a_constant_belongs_to_its_mode_only():
    with pytest.raises(AlgorithmConfigError, match="mode 'constant' with constant 0"):
        AggregationConfig(mode="constant")
    with pytest.raises(AlgorithmConfigError, match="mode 'token_mean' with constant 9"):
        AggregationConfig(mode="token_mean", constant=9)


def test_parts_of_a_step_add():
    one = torch.tensor(1.0)
    part = LossSum(total=one, weight=2 * one, metrics={"a": one})

    both = part + LossSum(total=3 * one, weight=one, metrics={"a": one, "b": one})

    assert (both.total, both.weight, dict(both.metrics)) == (4.0, 3.0, {"a": 2.0, "b": 1.0})


def config(mode):
    return AggregationConfig(mode=mode, constant=8 if mode == "constant" else 0)


class TinyModel(nn.Module):
    """The surface of a causal language model: each token predicts the next by itself."""

    config = None

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=True)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        assert use_cache is False

        class Output:
            logits = self.head(self.embed(input_ids).tanh())

        return Output


class TinyCritic(TinyModel):
    """The same with a value head, which says something else of every token."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.value_head = nn.Linear(6, 1, bias=False)
        nn.init.constant_(self.value_head.weight, 0.3)


def random_samples(seed):
    random = np.random.default_rng(seed)
    samples = []
    for index in range(9):
        prompt, response = random.integers(1, 5), random.integers(0 if index == 2 else 1, 9)
        length = int(prompt + response)
        trainable = np.arange(length) >= prompt
        samples.append(
            Trajectory(
                prompt_id="p",
                group=f"g{index % 4}",
                sibling=index,
                attempt=0,
                token_ids=random.integers(0, 11, length).astype(np.int32),
                logprobs=(random.normal(-2.0, 0.3, length) * trainable).astype(np.float32),
                trainable=trainable,
                versions=(VersionSpan(0, length),),
                rewards={},
                reward=float(random.normal()),
                finish_reason="stop",
            )
        )
    return samples


def gradient(model, algorithm, samples, shares, other=None):
    model.zero_grad()
    weight = torch.zeros((), dtype=torch.float64)
    batches = []
    for share in shares:
        for batch in [*algorithm.batches(samples, share, policy_version=0), empty_batch()]:
            if other is not None:
                batch = algorithm.with_teacher(other, algorithm.with_reference(other, batch))
            if algorithm.scores_first:
                batch = algorithm.with_token_advantages(model, batch)
            batches.append(batch)
    if algorithm.whitens:
        moments = reduce(add, map(advantage_moments, batches))
        batches = [with_whitened_advantages(batch, moments) for batch in batches]
    for batch in batches:
        part = algorithm.loss(model, batch)
        part.total.backward()
        weight += part.weight
    return torch.cat([p.grad.flatten() for p in model.parameters()]) / weight


def loop_losses(model, group):
    """-TIS(π/μ) A π/sg(π), token after token; Dr.GRPO advantages."""
    advantage_of = {s.sibling: s.reward - sum(o.reward for o in group) / len(group) for s in group}
    losses = {}
    for sample in group:
        ids = torch.tensor(sample.token_ids).long()
        logp = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0], -1)
        terms = losses[sample.sibling] = []
        for step in range(1, len(ids)):
            if sample.trainable[step]:
                now = logp[step - 1, ids[step]]
                weight = min(float(torch.exp(now.detach() - float(sample.logprobs[step]))), 2.0)
                terms.append(-weight * advantage_of[sample.sibling] * (now - now.detach()).exp())
    return losses


def loop_loss(model, samples, mode):
    groups = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    losses = [loop_losses(model, group) for group in groups.values()]
    sequences = [terms for group in losses for terms in group.values() if terms]
    match mode:
        case "token_mean":
            return sum(map(sum, sequences)) / sum(map(len, sequences))
        case "sequence_mean":
            return sum(sum(terms) / len(terms) for terms in sequences) / len(sequences)
        case "sequence_sum":
            return sum(map(sum, sequences)) / len(sequences)
        case "constant":
            return sum(map(sum, sequences)) / (8 * len(sequences))
        case "prompt_mean":
            flat = [[t for terms in group.values() for t in terms] for group in losses]
            return sum(sum(terms) / len(terms) for terms in flat) / len(flat)
