"""Loops of somebody else: left-padded rows, autocast, compiled losses, DDP, numbers at padding.

The reference is a loop over Python floats, one token at a time.
"""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel

from cosmos_algos import (
    AggregationConfig,
    KlConfig,
    NoCorrection,
    ObjectiveConfig,
    RewardError,
    ShapeError,
    TokenBatch,
    TokenScores,
    batch_of_targets,
    chunked_logprobs,
    empty_batch,
    group_advantages,
    group_ids,
    model_scores,
    policy_objective,
    sample_weights,
    scores_from_logits,
)

MASK = torch.tensor(  # padded on the left and on the right; the last row has nothing
    [
        [0, 0, 1, 1, 1, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0],
    ]
).bool()
GROUPS = ["a", "a", "b", "b"]
ADVANTAGES = [1.0, -0.5, 0.25, 2.0]
VOCABULARY = 7
PLAIN = ObjectiveConfig(correction=NoCorrection())


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def given() -> tuple[Tensor, Tensor, TokenBatch]:
    """Return logits, targets and the batch that a loop makes of its own tensors."""
    targets = torch.arange(MASK.numel()).reshape(MASK.shape) % VOCABULARY
    weights = sample_weights(MASK.sum(1), GROUPS, AggregationConfig(mode="sequence_mean"))
    behaviour = numbers(1, *MASK.shape) * 0.3 - 1.9
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    batch = batch_of_targets(targets, MASK, behaviour, advantages, weights)
    old = replace(batch, old_logprobs=behaviour)
    return numbers(0, *MASK.shape, VOCABULARY), targets, old


def by_hand(logits: Tensor, targets: Tensor, old: Tensor) -> float:
    """Return the mean over samples of the means over tokens of PPO's clipped loss."""
    total, num_samples = 0.0, 0
    for row, kept in enumerate(MASK.tolist()):
        losses = []
        for column in [place for place, is_kept in enumerate(kept) if is_kept]:
            scores = logits[row, column].tolist()
            norm = math.log(sum(math.exp(score) for score in scores))
            chosen = scores[int(targets[row, column])] - norm
            ratio = math.exp(chosen - float(old[row, column]))
            held = min(max(ratio, 0.8), 1.2)
            losses.append(-min(ratio * ADVANTAGES[row], held * ADVANTAGES[row]))
        if losses:
            total, num_samples = total + sum(losses) / len(losses), num_samples + 1
    return total / num_samples


def test_rows_padded_on_either_side_have_the_loss_of_a_loop():
    logits, targets, batch = given()
    assert batch.old_logprobs is not None
    part = policy_objective(scores_from_logits(logits.bfloat16(), targets), batch, PLAIN)
    wanted = by_hand(logits.bfloat16().double(), targets, batch.old_logprobs.double())
    assert float(part.weight) == 3.0
    assert float(part.total / part.weight) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("padding", [math.nan, -math.inf, math.inf])
def test_what_stands_at_padding_is_of_no_account(padding: float):
    logits, targets, batch = given()
    objective = replace(PLAIN, kl=KlConfig(coefficient=0.1), entropy_coefficient=0.01)
    batch = replace(batch, reference_logprobs=batch.behaviour_logprobs - 0.1)
    wanted = policy_objective(scores_from_logits(logits, targets), batch, objective)
    scores = scores_from_logits(logits, targets)
    spoilt = {
        name: getattr(batch, name).masked_fill(~MASK, padding)
        for name in ("behaviour_logprobs", "advantages", "old_logprobs", "reference_logprobs")
    }
    logprobs = scores.logprobs.masked_fill(~MASK, padding).requires_grad_()
    found = policy_objective(
        TokenScores(logprobs, scores.entropies.masked_fill(~MASK, padding)),
        replace(batch, **spoilt),
        objective,
    )
    found.total.backward()
    assert float(found.total.detach()) == float(wanted.total)
    assert {name: float(v) for name, v in found.metrics.items()} == {
        name: float(v) for name, v in wanted.metrics.items()
    }
    assert logprobs.grad is not None
    assert not logprobs.grad[~MASK].any()
    assert logprobs.grad[MASK].isfinite().all()


# In a process of its own: the checks of shapes that tests add cannot be compiled.
COMPILED = """
from dataclasses import replace
import torch
import cosmos_algos as ca

mask = torch.tensor([[False, True, True], [True, False, False]])
ids, old = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.full((2, 3), -1.9)
weights = ca.sample_weights(mask.sum(1), ["a", "a"], ca.AggregationConfig())
batch = ca.batch_of_targets(ids, mask, old, torch.tensor([1.0, -1.0]), weights)
batch = replace(batch, reference_logprobs=old - 0.1)
objective = ca.ObjectiveConfig(kl=ca.KlConfig(coefficient=0.1), entropy_coefficient=0.01)


def loss(logits):
    return ca.policy_objective(ca.scores_from_logits(logits, ids), batch, objective).total


whole = torch.linspace(-1, 1, 42).reshape(2, 3, 7).requires_grad_()
eager = whole.detach().clone().requires_grad_()
torch.compile(loss, fullgraph=True, backend="aot_eager")(whole).backward()
loss(eager).backward()
assert eager.grad[mask].all() and not eager.grad[~mask].any()
assert torch.equal(whole.grad, eager.grad)
"""


def test_the_objective_compiles_as_one_graph():
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("hidden_type", [torch.float32, torch.bfloat16])
def test_chunks_under_autocast_are_the_linear_layer_under_autocast(hidden_type: torch.dtype):
    hidden, weight = numbers(2, 3, 6, 8).to(hidden_type), numbers(3, VOCABULARY, 8)
    targets = torch.arange(18).reshape(3, 6) % VOCABULARY
    leaves = [(hidden.clone().requires_grad_(), weight.clone().requires_grad_()) for _ in range(2)]
    (chunked_hidden, chunked_weight), (plain_hidden, plain_weight) = leaves
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chunked_logprobs(chunked_hidden, chunked_weight, targets, chunk=5).logprobs
        logits = linear(plain_hidden, plain_weight)
        wanted = -cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(found.flatten(), wanted, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(chunked_hidden.grad, plain_hidden.grad, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(chunked_weight.grad, plain_weight.grad, atol=4e-2, rtol=2e-2)


def test_a_tensor_of_each_sample_is_the_number_of_its_group():
    numbers_of_groups = torch.tensor([5, 5, 9])
    assert group_ids(list(numbers_of_groups)).tolist() == [0, 0, 1]
    found = group_advantages("dr_grpo", [1.0, 0.0, 3.0], list(numbers_of_groups))
    assert found.tolist() == [0.5, -0.5, 0.0]
    with pytest.raises(ShapeError, match="must be one number"):
        group_ids(list(torch.zeros(2, 2)))
    with pytest.raises(RewardError, match="flatten"):
        group_advantages("grpo", torch.zeros(2, 2), ["a", "b"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embed(input_ids)))


def right_padded() -> TokenBatch:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 1, 0]])
    trained = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]).bool()
    return replace(
        empty_batch(4, num_rows=2),
        token_ids=ids,
        valid=ids > 0,
        targets=ids.roll(-1, 1),
        trainable=trained,
    )


def test_rows_that_a_causal_model_would_misread_are_refused():
    batch = right_padded()
    model_scores(Model(), batch)
    with pytest.raises(ShapeError, match="right-padded"):
        model_scores(Model(), replace(batch, valid=batch.valid.flip(1)))
    with pytest.raises(ShapeError, match="scores_from_logits"):
        model_scores(Model(), given()[2])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_within_ddp_is_scored(one_rank: None):
    batch, model = right_padded(), Model()
    wanted = model_scores(model, batch)
    wrapped = DistributedDataParallel(model)
    found = model_scores(wrapped, batch)
    found.logprobs.sum().backward()
    assert torch.equal(found.logprobs, wanted.logprobs)
    assert model.head.weight.grad is not None
