"""What a loop of one's own hands over by mistake: it is refused, or means what it looks like."""

import json
import subprocess
import sys

import pytest
import torch

from cosmos_algos import (
    AggregationConfig,
    group_advantages,
    groups_with_signal,
    length_rewards,
    sample_weights,
)

NUMBERS = torch.tensor([3, 3, 4, 4])
DEADLINE_S = 240.0
# In a process of its own: types are not checked there, as they are in the tests of this folder.
CALLS = """
import json, sys
import torch
from cosmos_algos import *

wide = torch.ones(3, 3)  # over whose tokens [3] would be stretched, instead of over its samples
three, one = torch.ones(3), torch.ones(1)
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
        "ShapeError: weights: 3 token counts for 2 group entries; "
    ),
    "grpo_advantages(wide, three.long())": "ShapeError: advantages: rewards (3, 3) and groups (3,)",
    "grpo_advantages(three, three)": (
        "ShapeError: advantages: rewards (3,) and groups (3,) of torch.float32; "
    ),
    "grpo_advantages(one, torch.tensor([-1]))": "ShapeError: advantages: group -1; ",
    "grpo_advantages(one / 0, one.long())": "RewardError: sample 0 of the step: reward inf; ",
    "AggregationConfig(mode='mean')": (
        "AlgorithmConfigError: aggregation: mode is 'mean'; it must be one of 'token_mean', "
    ),
    "KlConfig(estimator='k9')": "AlgorithmConfigError: kl: estimator is 'k9'; ",
    "KlConfig(place='losses')": "AlgorithmConfigError: kl: place is 'losses'; ",
    "kl_values(wide, wide, 'k9')": "AlgorithmConfigError: kl: estimator is 'k9'; ",
    "GspoClip(level='tokens')": "AlgorithmConfigError: gspo: level is 'tokens'; ",
    "AipoClip(gradient='all')": "AlgorithmConfigError: aipo: gradient is 'all'; ",
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
    """What became of each call that is to be refused."""
    command = [sys.executable, "-c", CALLS]
    told = json.dumps(list(REFUSED))
    done = subprocess.run(
        command, input=told, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("call", REFUSED)
def test_what_would_train_on_something_else_is_refused(said, call):
    assert said[call].startswith(REFUSED[call])


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
