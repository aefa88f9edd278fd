"""What a loop of one's own hands over by mistake: it is refused, or means what it looks like."""

import json
import math
import subprocess
import sys

import pytest
import torch

from cosmos_algos import (
    AggregationConfig,
    AipoClip,
    AlgorithmConfigError,
    ClipConfig,
    GspoClip,
    OffPolicyMask,
    OverlongConfig,
    SapoGate,
    SftConfig,
    group_advantages,
    groups_with_signal,
    length_rewards,
    sample_weights,
)

RETURNS = "returns_to_go(torch.tensor([[0, 0, 1]]), Samples(mask[:1]), 0.5).tolist()"
WHITENED = (
    "whitened(torch.tensor([[0, 1, 5]]), torch.tensor([[True, True, False]]), "
    "Moments(*torch.tensor([2.0, 1.0, 1.5]))).tolist()"
)
NUMBERS = torch.tensor([3, 3, 4, 4])
DEADLINE_S = 240.0
# In a process of its own: types are not checked there, as they are in the tests of this folder.
CALLS = """
import json, sys
from dataclasses import replace
import torch
from cosmos_algos import *

wide = torch.ones(3, 3)  # over whose tokens [3] would be stretched, instead of over its samples
three, one = torch.ones(3), torch.ones(1)
column, mask = torch.ones(3, 1), wide.bool()
tokens = Samples(mask)
batch = empty_batch(3, num_rows=3)
sample = LabelledTokens(token_ids=three.int().numpy(), trainable=(three == 0).numpy())
weights = sample_weights([1, 1], [0, 0], AggregationConfig())
lags = wide.long()
found = {}
for call in json.load(sys.stdin):
    try:
        found[call] = repr(eval(call))
    except AlgosError as error:
        found[call] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""
REFUSED = {
    "clipped_surrogate(wide, three, ClipConfig())": (
        "ShapeError: clipped surrogate: ratios (3, 3), advantages (3,); they must have as many "
        "dimensions as each other (one number for each sample is values[:, None])"
    ),
    "policy_surrogate(wide, wide, three, Samples(wide.bool()), AipoClip())": (
        "ShapeError: policy loss: logprobs (3, 3), anchor (3, 3), advantages (3,); "
    ),
    "chunked_logprobs(torch.ones(2, 5, 4), torch.ones(9, 4), torch.ones(5, 2).long())": (
        "ShapeError: log-probs: hidden states (2, 5, 4) need targets (2, 5), and not (5, 2); "
    ),
    "scores_from_logits(torch.ones(2, 5, 9), torch.ones(2, 4).long())": (
        "ShapeError: log-probs: logits (2, 5, 9) need targets (2, 5), and not (2, 4); a model's "
        "output at token t is for token t+1: pass logits[:, :-1] with ids[:, 1:]"
    ),
    "scores_from_logits(torch.ones(1, 4), one.long(), temperature=0.0)": (
        "AlgorithmConfigError: temperature is 0.0; "
    ),
    "dpo_losses(three, torch.ones(3, 1), beta=0.1)": (
        "ShapeError: dpo: chosen (3,), rejected (3, 1); they must have one shape"
    ),
    "ipo_losses(three, one, beta=0.1)": "ShapeError: ipo: chosen (3,), rejected (1,); ",
    "bradley_terry_losses(three, one)": "ShapeError: bradley-terry: chosen (3,), rejected (1,); ",
    "kto_losses(three, one.bool(), torch.zeros(()), beta=0.1)": (
        "ShapeError: kto: ratios (3,), desirable (1,); "
    ),
    "kl_values(three, one, 'k1')": "ShapeError: kl: logprobs (3,), reference_logprobs (1,); ",
    "sample_weights([5, 5, 2], ['a', 'b'], AggregationConfig())": (
        "ShapeError: weights: 3 token counts, 2 group entries; "
    ),
    "grpo_advantages(wide, three.long())": "ShapeError: advantages: rewards (3, 3) and groups (3,)",
    "grpo_advantages(three, three)": (
        "ShapeError: advantages: rewards (3,) and groups (3,) of torch.float32; "
    ),
    "grpo_advantages(one, torch.tensor([-1]))": "ShapeError: advantages: group -1; ",
    "grpo_advantages(one / 0, one.long())": "RewardError: sample 0 of the step: reward inf; ",
    "Samples(wide)": (
        "ShapeError: samples: trainable is a mask of torch.float32; it must be of truth values: "
    ),
    "Samples(mask, lags[:2])": "ShapeError: samples: trainable (3, 3), segments (2, 3); ",
    "Samples(mask, wide)": "ShapeError: samples: segments is of torch.float32; ",
    "correction_weights(three, MisConfig(), tokens)": (
        "ShapeError: correction: samples (3, 3), log_ratios (3,); they must have one shape"
    ),
    "kept_tokens(Distances(wide, wide, three, lags), tokens, ())": (
        "ShapeError: rejections: samples (3, 3), proximal (3, 3), current (3, 3), advantages (3,), "
    ),
    "policy_surrogate(wide, wide, wide, Samples(mask[:1]), ClipConfig())": (
        "ShapeError: policy loss: samples (1, 3), logprobs (3, 3); "
    ),
    "clipped_surrogate(wide, wide[:2], ClipConfig())": (
        "ShapeError: clipped surrogate: ratios (3, 3), advantages (2, 3); they must have one shape"
    ),
    "generalised_advantages(wide, column, tokens, GaeConfig())": "ShapeError: gae: samples ",
    "generalised_advantages(wide, wide, tokens, GaeConfig(), one)": (
        "ShapeError: gae: sums of rows (3,), bootstrap (1,); "
    ),
    "returns_to_go(three, tokens)": "ShapeError: returns: samples (3, 3), rewards (3,); ",
    "terminal_rewards(tokens, three)": "ShapeError: terminal rewards: samples (3, 3), rewards (3,)",
    "token_moments(wide, mask[0])": "ShapeError: moments: samples (3,), values (3, 3); ",
    "whitened(wide, wide.long(), token_moments(wide, mask))": (
        "ShapeError: samples: trainable is a mask of torch.int64; "
    ),
    "value_losses(wide, wide, three, 0.2)": (
        "ShapeError: value loss: values (3, 3), old_values (3, 3), returns (3,); "
    ),
    "with_gae(replace(batch, values=wide), GaeConfig(), three)": (
        "ShapeError: gae: rewards (3, 3), penalties (3,); "
    ),
    "kl_loss(wide, wide, three, KlConfig())": (
        "ShapeError: kl: logprobs (3, 3), importance (3,); they must have as many dimensions "
    ),
    "kl_reward(wide, wide, Samples(mask[:1]), KlConfig(estimator='k1'))": (
        "ShapeError: kl: samples (1, 3), logprobs (3, 3); "
    ),
    "mismatch_sums(wide, mask, lags[0])": (
        "ShapeError: mismatch: log_ratios (3, 3), trainable (3, 3), lags (3,); "
    ),
    "generalised_jsd(three, wide, 0.5)": "ShapeError: jsd: teacher (3,), student (3, 3); ",
    "bradley_terry_losses(three, three, margins=column)": (
        "ShapeError: bradley-terry: chosen (3,), rejected (3,), margins (3, 1); "
    ),
    "kto_losses(three, three, torch.zeros(()), beta=0.1)": (
        "ShapeError: kto: desirable is a mask of torch.float32; "
    ),
    "kto_losses(three, three.bool(), three, beta=0.1)": "ShapeError: kto: baseline (3,); ",
    "ipo_losses(three, three, beta=0.0)": "AlgorithmConfigError: ipo: beta is 0.0; ",
    "candidate_logprobs(wide, wide, lags[:1])": (
        "ShapeError: candidates: hidden states (3, 3) and token ids (1, 3); "
    ),
    "chunked_logprobs(wide, wide, three)": "ShapeError: log-probs: targets are of torch.float32; ",
    "chunked_logprobs(wide, wide, lags[0], bias=one)": (
        "ShapeError: log-probs: bias (1,) for an output embedding (3, 3); "
    ),
    "top_k(wide, 0)": "AlgorithmConfigError: top_k 0: the distribution has 3 tokens",
    "top_k(wide, 1, temperature=0.0)": "AlgorithmConfigError: temperature is 0.0; ",
    "reinforce_pp_advantages(three, column)": (
        "ShapeError: advantage reinforce_pp: rewards (3,), num_tokens (3, 1); "
    ),
    "opo_advantages(three, lags[0], one)": "ShapeError: advantage opo: rewards (3,), num_tokens ",
    "pass_at_k_advantages(three, lags[0], 0)": (
        "AlgorithmConfigError: advantage pass_at_k: k is 0; it must be 1 or more"
    ),
    "group_ids(wide)": "ShapeError: groups (3, 3); they must be [N], one for each sample",
    "groups_with_signal([1.0], ['a', 'b'])": "ShapeError: groups with signal: 1 rewards, 2 group ",
    "budget_rewards([1.0], [2, 3], [4])": "ShapeError: budget rewards: 1 rewards, 2 token counts, ",
    "without_truncated([1], [])": "ShapeError: without_truncated: 1 token counts, 0 finish ",
    "length_rewards([1], [True], [0, 0])": "ShapeError: length rewards: 1 token counts, ",
    "shared_prefix_masks([], ['a'])": "ShapeError: shared prefixes: 0 samples, 1 group entries; ",
    "prefix_tree_mask(lags)": "ShapeError: prefix tree: segments (3, 3); they must be [T]",
    "position_ids(lags[0])": "ShapeError: segments (3,); they must be [B, T]",
    "split_ranks([3], 0)": "AlgorithmConfigError: split: num_ranks is 0; it must be 1 or more",
    "sample_weights(column, [0] * 3, AggregationConfig())": (
        "ShapeError: weights: token counts (3, 1); they must be [N]"
    ),
    "imitation_weights([1, 1], [1.0], weights, 0.1)": (
        "ShapeError: imitation: 2 token counts, 1 rewards, 2 weights; "
    ),
    "collate([], one, weights)": "ShapeError: collate: 0 samples, 1 advantages; ",
    "collate_labelled([sample], weights)": (
        "ShapeError: collate: weights of 2 samples for 1; take those of the batch: "
    ),
    "replace(batch, advantages=three)": (
        "ShapeError: batch: advantages (3,) for token_ids (3, 3); it must have (3, 3) (see collate)"
    ),
    "replace(batch, denominators=one)": "ShapeError: batch: denominators (1,) for token_ids (3, 3)",
    "replace(batch, teacher_top_logprobs=wide)": "ShapeError: batch: teacher_top_logprobs (3, 3) ",
    "replace(batch, trainable=lags)": "ShapeError: batch: trainable is a mask of torch.int64; ",
    "replace(batch, advantages=lags)": "ShapeError: batch: advantages is of torch.int64; ",
    "replace(batch, lags=wide)": "ShapeError: batch: lags is of torch.float32; ",
    "replace(batch, token_ids=lags[0])": "ShapeError: batch: token_ids (3,); they must be [B, T]",
    "policy_objective(TokenScores(wide, three), batch, ObjectiveConfig())": (
        "ShapeError: policy loss: samples (3, 3), logprobs (3, 3), entropies (3,); "
    ),
    "policy_objective(TokenScores(wide, wide), batch, ObjectiveConfig(), column)": (
        "ShapeError: policy loss: samples (3, 3), logprobs (3, 3), entropies (3, 3), beside (3, 1);"
    ),
    "proximal_logprobs(three, batch, 'old')": "ShapeError: proximal log-probs: samples (3, 3), ",
    "AggregationConfig(mode='mean')": (
        "AlgorithmConfigError: aggregation: mode is 'mean'; it must be one of 'token_mean', "
    ),
    "weights.select(torch.tensor([True, True]))": (
        "ShapeError: weights: rows is of torch.bool; it must be of whole numbers: "
    ),
    "weights.select([True, False])": "ShapeError: weights: rows is of torch.bool; ",
    "KlConfig(estimator='k9')": "AlgorithmConfigError: kl: estimator is 'k9'; ",
    "KlConfig(place='losses')": "AlgorithmConfigError: kl: place is 'losses'; ",
    "kl_values(wide, wide, 'k9')": "AlgorithmConfigError: kl: estimator is 'k9'; ",
    "GspoClip(level='tokens')": "AlgorithmConfigError: gspo: level is 'tokens'; ",
    "AipoClip(gradient='all')": "AlgorithmConfigError: aipo: gradient is 'all'; ",
    "DpoConfig(form='ipo')": "AlgorithmConfigError: dpo: form is 'ipo'; ",
    "ObjectiveConfig(anchor='new')": "AlgorithmConfigError: objective: anchor is 'new'; ",
    "correction_weights(wide, TisConfig(level='sample'))": (
        "AlgorithmConfigError: level of a ratio is 'sample'; "
    ),
    "group_advantages('grppo', [1.0], ['a'])": "AlgorithmConfigError: advantage is 'grppo'; ",
    "step_advantages('grppo', StepRewards(rewards=[1.0], groups=['a'], num_tokens=[1]))": (
        "AlgorithmConfigError: advantage is 'grppo'; it must be one of 'grpo', "
    ),
}


@pytest.fixture(scope="module")
def said():
    """What became of each call."""
    command = [sys.executable, "-c", CALLS]
    told = json.dumps([*REFUSED, RETURNS, WHITENED])
    done = subprocess.run(
        command, input=told, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("call", REFUSED)
def test_what_would_train_on_something_else_is_refused(said, call):
    assert said[call].startswith(REFUSED[call])


def test_rewards_may_be_whole_numbers_and_advantages_have_fractions_all_the_same(said):
    assert said[RETURNS] == "[[0.25, 0.5, 1.0]]"
    assert said[WHITENED] == "[[-0.5, 0.5, 0.0]]"


def test_groups_and_rewards_may_be_tensors():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    found = group_advantages("grpo", rewards, NUMBERS)
    torch.testing.assert_close(found, group_advantages("grpo", rewards.tolist(), NUMBERS.tolist()))
    assert found[0] == pytest.approx(0.5**0.5, rel=1e-5)
    assert groups_with_signal(rewards, NUMBERS) == [3]
    weights = sample_weights(
        torch.tensor([5, 5, 2, 2]), NUMBERS, AggregationConfig(mode="prompt_mean")
    )
    assert weights.token.tolist() == [0.1, 0.1, 0.25, 0.25]
    assert length_rewards([1, 3, 1, 1], [True] * 4, NUMBERS) == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda number: ClipConfig(high=number), "clip: low 0.2 must be in .* and high nan"),
        (lambda number: ClipConfig(dual=number), "clip: dual nan must be over 1"),
        (lambda number: GspoClip(high=number), "gspo: low 0.0003 must be in .* and high nan"),
        (lambda number: AipoClip(rho=number), "aipo: rho nan must be at least 1"),
        (lambda number: SapoGate(positive=number), "sapo: temperatures nan and 1.05 must be above"),
        (lambda number: SapoGate(negative=number), "sapo: temperatures 1.0 and nan must be above"),
        (lambda number: OffPolicyMask(bound=number), "off_policy: bound nan must be above 0"),
        (
            lambda number: OverlongConfig(max_tokens=8, buffer=4, penalty=number),
            "overlong: penalty nan must be 0 or more, and finite",
        ),
    ],
)
def test_a_setting_that_is_no_number_is_refused(make, message):
    with pytest.raises(AlgorithmConfigError, match=message):
        make(math.nan)


@pytest.mark.parametrize("setting", ["positive", "negative"])
def test_an_infinite_temperature_is_refused(setting):
    with pytest.raises(AlgorithmConfigError, match=r"sapo: temperatures .* above 0 and finite"):
        SapoGate(**{setting: math.inf})


def test_a_negative_number_of_targets_is_refused_before_the_first_batch():
    with pytest.raises(AlgorithmConfigError, match="sft: logprob_chunk -1 must be 0 or more"):
        SftConfig(logprob_chunk=-1)
