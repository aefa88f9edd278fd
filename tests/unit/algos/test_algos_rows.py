"""Samples put into one row give the loss and the metrics of the padded batch."""

from dataclasses import replace

import pytest
import torch

from cosmos_algos import (
    AlgorithmConfig,
    DapoConfig,
    DecoupledPpoConfig,
    GrpoConfig,
    GspoConfig,
    KlConfig,
    ObjectiveConfig,
    RatioMask,
    TokenBatch,
    TokenScores,
    empty_batch,
    in_one_row,
    policy_objective,
    position_ids,
    with_idle_tokens,
)

LENGTHS = (4, 2, 6)


def padded() -> TokenBatch:
    """Three samples of 4, 2 and 6 tokens; the first token of each is a prompt."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(6)
    lengths = torch.tensor(LENGTHS)[:, None]
    valid = columns < lengths
    trainable = columns < lengths - 1
    token_ids = torch.randint(1, 9, (3, 6), generator=generator) * valid
    return replace(
        empty_batch(),
        token_ids=token_ids,
        valid=valid,
        targets=token_ids.roll(-1, dims=1),
        trainable=trainable,
        behaviour_logprobs=-torch.rand(3, 6, generator=generator) * trainable,
        advantages=torch.tensor([[1.0], [-2.0], [0.5]]) * trainable,
        token_weights=torch.tensor([[0.3], [1.0], [0.2]]) * trainable,
        denominators=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        lags=torch.randint(0, 3, (3, 6), generator=generator) * trainable,
        reference_logprobs=-torch.rand(3, 6, generator=generator) * trainable,
        names=("group 0 sibling 0", "group 0 sibling 1", "group 1 sibling 0"),
    )


def test_a_row_holds_the_tokens_of_all_samples_and_nothing_else():
    batch = padded()
    row = in_one_row(batch)
    own = [batch.token_ids[index, :length] for index, length in enumerate(LENGTHS)]
    assert torch.equal(row.token_ids, torch.cat(own)[None])
    assert row.segments is not None
    assert row.segments.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2]]
    assert position_ids(row.segments).tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 5]]
    assert row.denominators.tolist() == [6.0]
    assert row.names == batch.names


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(),
        DapoConfig(),
        GspoConfig(),
        DecoupledPpoConfig(),
        GrpoConfig(
            objective=ObjectiveConfig(
                kl=KlConfig(coefficient=0.1), rejections=(RatioMask(),), entropy_coefficient=0.01
            )
        ),
    ],
    ids=lambda config: config.kind,
)
def test_the_loss_of_a_row_is_that_of_the_padded_batch(config: AlgorithmConfig):
    batch = padded()
    row = in_one_row(batch)
    generator = torch.Generator().manual_seed(1)
    logprobs = (-torch.rand(3, 6, generator=generator) * batch.trainable).requires_grad_()
    entropies = torch.rand(3, 6, generator=generator) * batch.trainable
    objective = config.build().objective
    apart = policy_objective(TokenScores(logprobs, entropies), batch, objective)
    (apart_gradient,) = torch.autograd.grad(apart.total, logprobs)
    scores = TokenScores(logprobs[batch.valid][None], entropies[batch.valid][None])
    together = policy_objective(scores, row, objective)
    (gradient,) = torch.autograd.grad(together.total, logprobs)
    assert together.total.item() == pytest.approx(apart.total.item(), rel=1e-6)
    assert together.weight.item() == apart.weight.item() == 6.0
    torch.testing.assert_close(gradient, apart_gradient, rtol=1e-6, atol=1e-7)
    for name, value in apart.metrics.items():
        torch.testing.assert_close(together.metrics[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_batch_without_tokens_and_a_row_already_packed_stay_as_they_are():
    empty = empty_batch()
    assert in_one_row(empty) is empty
    row = in_one_row(padded())
    assert in_one_row(row) is row


def test_pictures_stay_in_order_and_what_is_said_of_tokens_moves_with_them():
    kinds = torch.arange(18).reshape(3, 6)
    inputs = {
        "pixel_values": torch.arange(18).reshape(3, 6),  # as if of tokens, and it is not
        "mm_token_type_ids": kinds,
        "position_ids": torch.stack([kinds, kinds + 100, kinds + 200, kinds + 300]),
    }
    batch = replace(padded(), image_inputs=inputs)
    row = in_one_row(batch)
    assert row.image_inputs is not None
    assert torch.equal(row.image_inputs["pixel_values"], inputs["pixel_values"])
    assert torch.equal(row.image_inputs["mm_token_type_ids"], kinds[batch.valid][None])
    positions = row.image_inputs["position_ids"]
    assert positions.shape == (4, 1, 12)
    assert torch.equal(positions[3, 0], kinds[batch.valid] + 300)
    moved = batch.to("meta")
    assert moved.image_inputs is not None
    assert {value.device.type for value in moved.image_inputs.values()} == {"cpu"}  # until a pass
    assert {value.device.type for value in moved.image_arguments().values()} == {"meta"}


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("num_tokens", [2, 9])
def test_idle_tokens_stand_behind_the_shortest_row_and_weigh_nothing(num_tokens: int, valid: bool):
    batch = padded()
    more, row = with_idle_tokens(batch, [7] * num_tokens, valid=valid)
    assert row == 1  # of 2 tokens
    width = max(6, 2 + num_tokens)
    assert more.token_ids.shape == (3, width)
    behind = [7] * num_tokens + [0] * (width - 2 - num_tokens)
    assert more.token_ids[1].tolist() == batch.token_ids[1, :2].tolist() + behind
    assert more.valid.sum(-1).tolist() == [4, 2 + num_tokens * valid, 6]
    assert torch.equal(more.token_ids[[0, 2], :6], batch.token_ids[[0, 2]])
    assert torch.equal(more.trainable[:, :6], batch.trainable)
    assert not more.trainable[:, 6:].any()
    assert batch.token_ids[1, 2:].tolist() == [0] * 4  # the batch itself is as it was
    objective = DapoConfig().build().objective
    found = [
        policy_objective(TokenScores(zeros, zeros), each, objective).total.item()
        for each in (batch, more)
        for zeros in (torch.zeros(each.trainable.shape),)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    nothing, _ = with_idle_tokens(empty_batch(), [7] * num_tokens, valid=valid)
    assert in_one_row(nothing).token_ids.tolist() == [[7] * num_tokens]
