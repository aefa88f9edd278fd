"""Choosing an algorithm in a recipe, and from samples of a step to its loss."""

import inspect
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from cosmos_algos import (
    AipoClip,
    AlgorithmConfig,
    AlgorithmConfigError,
    CispoClip,
    ClipConfig,
    DapoConfig,
    DpoConfig,
    DrGrpoConfig,
    EmptyStepError,
    GivenDataConfig,
    GrpoConfig,
    GspoClip,
    IcePopConfig,
    KlConfig,
    KtoConfig,
    MissingScoresError,
    NoCorrection,
    ObjectiveConfig,
    OnPolicyDistillationConfig,
    PassAtKConfig,
    PpoConfig,
    ReinforcePlusPlusConfig,
    RewardModelConfig,
    SapoGate,
    SftConfig,
    Share,
    TokenIdError,
    advantage_moments,
    policy_loss,
    with_whitened_advantages,
)
from cosmos_core.config import ConfigError, config_from_json, config_to_json, load_config
from cosmos_core.trajectory import Trajectory, VersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    algorithm: AlgorithmConfig = field(default_factory=GrpoConfig)


GIVEN = [SftConfig, DpoConfig, KtoConfig, RewardModelConfig]


@pytest.mark.parametrize(
    ("kind", "advantage", "mode", "surrogate"),
    [
        ("grpo", "grpo", "sequence_mean", ClipConfig(low=0.2, high=0.2)),
        ("dapo", "grpo", "token_mean", ClipConfig(low=0.2, high=0.28)),
        ("dr_grpo", "dr_grpo", "constant", ClipConfig(low=0.2, high=0.2)),
        ("rloo", "rloo", "sequence_sum", ClipConfig()),
        ("reinforce_pp", "reinforce_pp", "token_mean", ClipConfig()),
        ("max_rl", "max_rl", "sequence_mean", ClipConfig()),
        ("opo", "opo", "sequence_sum", ClipConfig()),
        ("pass_at_k", "pass_at_k", "sequence_mean", ClipConfig()),
        ("gspo", "grpo", "sequence_mean", GspoClip(low=3e-4, high=4e-4)),
        ("cispo", "grpo", "token_mean", CispoClip(cap=5.0)),
        ("aipo", "grpo", "token_mean", AipoClip(rho=5.0)),
        ("sapo", "grpo", "sequence_mean", SapoGate(positive=1.0, negative=1.05)),
        ("decoupled_ppo", "grpo", "token_mean", ClipConfig()),
        ("ppo", "reward", "token_mean", ClipConfig()),
        ("on_policy_distillation", "none", "token_mean", ClipConfig()),
    ],
)
def test_each_kind_is_its_paper_and_corrects_by_default(kind, advantage, mode, surrogate):
    algorithm = load_config(Recipe, {"algorithm": {"kind": kind}}).algorithm.build()

    assert algorithm.advantage == advantage
    assert algorithm.aggregation.mode == mode
    assert algorithm.objective.surrogate == surrogate
    assert algorithm.objective.corrects


def test_no_two_algorithms_share_a_kind_and_all_are_corrected_by_default():
    kinds = [config().kind for config in (*get_args(AlgorithmConfig), *GIVEN)]

    assert len(set(kinds)) == len(kinds) == 19
    assert all(config().build().objective.corrects for config in get_args(AlgorithmConfig))
    assert list(get_args(GivenDataConfig)) == GIVEN


# recipes with settings of their own, or a rule about them
LONGER = {
    ReinforcePlusPlusConfig: 43,  # when returns are whitened
    PassAtKConfig: 46,  # k, and what it may be
    PpoConfig: 47,  # the critic, positive samples, epochs
    OnPolicyDistillationConfig: 58,  # two forms, by one token or by the likeliest
}


@pytest.mark.parametrize("config", get_args(AlgorithmConfig))
def test_a_recipe_is_a_file_of_forty_lines(config):
    lines = inspect.getsource(inspect.getmodule(config)).splitlines()
    assert len(lines) <= LONGER.get(config, 41)


@pytest.mark.parametrize("config", get_args(AlgorithmConfig))
def test_every_algorithm_trains_on_a_step_once_its_batches_have_what_it_needs(config):
    # The best of both always succeeds, so neither is worth more: pass@1.
    recipe = config(k=1) if config is PassAtKConfig else config()
    algorithm = recipe.build()
    model, other = TinyModel(seed=0), TinyModel(seed=1)

    (batch,) = algorithm.batches(samples(), Share(max_tokens=100), policy_version=2)
    batch = algorithm.with_teacher(other, algorithm.with_reference(other, batch))
    if algorithm.critic is not None:
        batch = algorithm.with_critic(model, batch)
    part = policy_loss(recipe)(model, batch)
    part.total.backward()

    assert part.total.isfinite()
    assert model.embed.weight.grad.isfinite().all()
    assert model.embed.weight.grad.abs().sum() > 0.0


def test_distillation_without_a_teacher_names_what_is_missing():
    config = OnPolicyDistillationConfig()
    (batch,) = config.build().batches(samples(), Share(max_tokens=100), policy_version=2)

    message = r"needs the batch's teacher_logprobs; it has none \(first sample: group g sibling 0\)"
    with pytest.raises(MissingScoresError, match=message):
        policy_loss(config)(TinyModel(), batch)


def test_the_likelihood_of_positive_samples_has_the_count_of_the_whole_step():
    # Two micro-batches, the second without positive samples: μ Σ -log π / 3 positive tokens.
    model, step = TinyModel(), samples()
    config = PpoConfig(imitation_coefficient=0.5, objective=ObjectiveConfig())
    total = weight = 0.0
    plain = replace(config, imitation_coefficient=0.0)
    for sign, one in ((1, config), (-1, plain)):
        algorithm = one.build()
        for batch in algorithm.batches(step, Share(max_tokens=4), policy_version=2):
            part = algorithm.loss(model, algorithm.with_critic(model, batch))
            total += sign * part.total.item()
            weight = weight + part.weight.item() if sign > 0 else weight

    logp = model.embed.weight.log_softmax(-1)
    first = step[0].token_ids.tolist()
    likelihood = sum(logp[a, b].item() for a, b in itertools.pairwise(first))
    assert total / weight == pytest.approx(-0.5 * likelihood / 3, rel=1e-5)


def test_ppo_tells_the_divergence_that_its_rewards_are_penalised_by():
    kl = KlConfig(coefficient=0.1, estimator="k1", place="reward")
    algorithm = PpoConfig(objective=ObjectiveConfig(kl=kl)).build()
    model, other = TinyModel(seed=0), TinyModel(seed=1)
    (batch,) = algorithm.batches(samples(), Share(max_tokens=100), policy_version=2)
    batch = algorithm.with_critic(model, algorithm.with_reference(other, batch))
    gap = model.embed.weight.log_softmax(-1) - other.embed.weight.log_softmax(-1)
    rows, columns = batch.trainable.nonzero(as_tuple=True)
    expected = gap[batch.token_ids[rows, columns], batch.targets[rows, columns]].sum()
    found = algorithm.loss(model, batch).metrics["kl"]
    torch.testing.assert_close(found, expected, check_dtype=False)


def test_a_step_without_a_trained_token_is_an_error():
    masked = [
        replace(s, trainable=np.zeros(4, np.bool_), logprobs=np.zeros(4, np.float32))
        for s in samples()
    ]

    with pytest.raises(EmptyStepError, match="2 samples, the first of group g, and none of them"):
        GrpoConfig().build().batches(masked, Share(max_tokens=100), policy_version=2)


def test_a_step_without_samples_is_an_error_on_every_rank():
    for rank in range(2):
        with pytest.raises(EmptyStepError, match="the step has no samples"):
            GrpoConfig().build().batches(
                [], Share(max_tokens=100, rank=rank, num_ranks=2), policy_version=2
            )


def test_a_token_beyond_the_vocabulary_names_sample_and_place():
    share = Share(max_tokens=100, vocab_size=5)

    with pytest.raises(TokenIdError, match="group g sibling 0: token 2 is 5; token ids are 0 to 4"):
        GrpoConfig().build().batches(samples(), share, policy_version=2)


def test_a_reference_that_is_reset_is_the_policy_of_every_nth_version():
    kl = KlConfig(coefficient=0.1, reset_every=10)

    assert [kl.reference_version(v) for v in (0, 9, 10, 19, 25)] == [0, 0, 10, 10, 20]
    assert KlConfig().reference_version(25) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KlConfig(place="reward"), "'k2' is not the divergence as a value"),
        (
            lambda: whitened("k3").build(),
            "whitening does not reach the gradient of 'k3' in the reward",
        ),
        (lambda: KlConfig(reset_every=-1), "reset_every -1 must not be negative"),
        (lambda: KlConfig(discount=1.01), r"kl: discount 1\.01 must be in \[0, 1\]"),
        (lambda: PassAtKConfig(k=0), "k 0 must be at least 1"),
        (lambda: GrpoConfig(temperature=0.0).build(), r"temperature is 0\.0"),
        (lambda: GrpoConfig(logprob_chunk=-1).build(), "logprob_chunk -1"),
        (lambda: GrpoConfig(temperature=math.inf).build(), "temperature is inf"),
        (lambda: PpoConfig(imitation_coefficient=-1.0).build(), "imitation_coefficient -1.0 must"),
    ],
)
def test_contradictions_are_refused_on_construction(make, message):
    with pytest.raises(AlgorithmConfigError, match=message):
        make()


def whitened(estimator="k1", **settings):
    kl = KlConfig(coefficient=0.5, estimator=estimator, place="reward")
    return ReinforcePlusPlusConfig(objective=ObjectiveConfig(kl=kl), **settings)


def test_reinforce_pp_whitens_what_its_penalty_makes_of_rewards():
    # Three trained tokens each; k1 of a token is the gap below: A_t = R - 0.5 Σ_{s≥t} k1_s.
    algorithm, model, other = whitened().build(), TinyModel(seed=0), TinyModel(seed=1)
    (batch,) = algorithm.batches(samples(), Share(max_tokens=100), policy_version=2)

    batch = algorithm.with_token_advantages(model, algorithm.with_reference(other, batch))

    gap = model.embed.weight.log_softmax(-1) - other.embed.weight.log_softmax(-1)
    for row, sample in enumerate(samples()):
        k1 = [gap[a, b].item() for a, b in itertools.pairwise(sample.token_ids.tolist())]
        expected = [sample.reward - 0.5 * sum(k1[t:]) for t in range(3)]
        assert batch.advantages[row, :3].tolist() == pytest.approx(expected, rel=1e-5)
    assert algorithm.whitens
    white = with_whitened_advantages(batch, advantage_moments(batch)).advantages[batch.trainable]
    assert (white.mean().item(), white.var().item()) == pytest.approx((0.0, 1.0), abs=1e-6)


def test_reinforce_pp_without_a_penalty_takes_no_pass_ahead_and_with_one_says_that_it_must():
    assert not ReinforcePlusPlusConfig().build().scores_first
    assert not whitened(advantage="grpo").build().scores_first

    algorithm, model = whitened().build(), TinyModel()
    (batch,) = algorithm.batches(samples(), Share(max_tokens=100), policy_version=2)
    with pytest.raises(MissingScoresError, match=r"whitening .* needs the batch's old_logprobs"):
        algorithm.loss(model, algorithm.with_reference(model, batch))


class TinyModel(nn.Module):
    """Each token predicts the next by itself."""

    config = None

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 7)
        self.head = nn.Identity()
        self.value_head = nn.Linear(7, 1, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        class Output:
            logits = self.head(self.embed(input_ids))

        return Output


def samples():
    """One right and one wrong answer of one group, three trained tokens each, one version old."""
    return [
        Trajectory(
            prompt_id="p",
            group="g",
            sibling=sibling,
            attempt=0,
            token_ids=np.array(ids, np.int32),
            logprobs=np.array([0.0, -2.0, -2.0, -2.0], np.float32),
            trainable=np.array([False, True, True, True]),
            versions=(VersionSpan(-1, 1), VersionSpan(1, 3)),
            rewards={},
            reward=reward,
            finish_reason="stop",
        )
        for sibling, (ids, reward) in enumerate([([1, 2, 5, 3], 1.0), ([1, 4, 2, 0], 0.0)])
    ]


def test_every_part_can_be_set_from_a_recipe_and_survives_json():
    recipe = load_config(
        Recipe,
        {"algorithm": {"kind": "dapo", "objective": {"correction": {"kind": "icepop"}}}},
        ["algorithm.aggregation.mode=prompt_mean", "algorithm.objective.surrogate.dual=3.0"],
    )

    assert isinstance(recipe.algorithm, DapoConfig)
    assert recipe.algorithm.objective.correction == IcePopConfig()
    assert recipe.algorithm.objective.surrogate.dual == 3.0
    assert config_from_json(Recipe, config_to_json(recipe)) == recipe


def test_a_contradiction_in_a_recipe_is_a_config_error():
    with pytest.raises(ConfigError, match="would count it twice"):
        load_config(Recipe, {"algorithm": {"objective": {"anchor": "behaviour"}}})

    behaviour = load_config(
        Recipe,
        {"algorithm": {"objective": {"anchor": "behaviour", "correction": {"kind": "none"}}}},
    )
    assert behaviour.algorithm.objective.correction == NoCorrection()


def test_dr_grpo_takes_the_longest_response_as_its_constant():
    recipe = load_config(
        Recipe, {"algorithm": {"kind": "dr_grpo"}}, ["algorithm.aggregation.constant=64"]
    )

    assert isinstance(recipe.algorithm, DrGrpoConfig)
    assert recipe.algorithm.aggregation.constant == 64
