"""DPO, IPO, KTO and reward models against plain floats, and through tiny models."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from cosmos_algos import (
    AggregationConfig,
    AlgorithmConfigError,
    DpoConfig,
    KtoBatch,
    KtoConfig,
    LabelledTokens,
    MissingScoresError,
    PairingError,
    RewardModelConfig,
    SftConfig,
    ShapeError,
    TokenIdError,
    TrajectoryError,
    bradley_terry_losses,
    collate_labelled,
    collate_pairs,
    dpo_losses,
    empty_batch,
    ipo_losses,
    kto_baseline,
    kto_losses,
    sample_weights,
)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def doubles(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


CHOSEN, REJECTED = [0.5, -1.0, 3.0], [0.2, 1.0, -2.0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_equals_its_formula(smoothing):
    losses = dpo_losses(doubles(*CHOSEN), doubles(*REJECTED), beta=0.3, label_smoothing=smoothing)

    expected = [
        -(1 - smoothing) * math.log(sigmoid(0.3 * (c - r)))
        - smoothing * math.log(sigmoid(-0.3 * (c - r)))
        for c, r in zip(CHOSEN, REJECTED, strict=True)
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


def test_at_the_reference_dpo_is_log_2_and_its_gradient_half_of_beta():
    chosen = doubles(0.0).requires_grad_()

    losses = dpo_losses(chosen, doubles(0.0), beta=0.1)
    losses.sum().backward()

    assert (losses.item(), chosen.grad.item()) == pytest.approx((math.log(2), -0.05))


def test_ipo_equals_its_formula():
    losses = ipo_losses(doubles(*CHOSEN), doubles(*REJECTED), beta=0.5)

    # 1/(2β) = 1: (0.3 - 1)², (-2 - 1)², (5 - 1)².
    assert losses.tolist() == pytest.approx([0.49, 9.0, 16.0])


def test_kto_equals_its_formula():
    losses = kto_losses(
        doubles(0.5, 0.5, -1.0),
        torch.tensor([True, False, True]),
        doubles(0.2)[0],
        beta=2.0,
        weights=(1.0, 1.5),
    )

    expected = [1 - sigmoid(0.6), 1.5 * (1 - sigmoid(-0.6)), 1 - sigmoid(-2.4)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_baseline_of_kto_is_a_mean_over_the_step_and_never_negative():
    assert kto_baseline(doubles(3.0)[0], doubles(4.0)[0]).item() == 0.75
    assert kto_baseline(doubles(-3.0)[0], doubles(4.0)[0]).item() == 0.0


def test_bradley_terry_equals_its_formula():
    losses = bradley_terry_losses(
        doubles(*CHOSEN), doubles(*REJECTED), margins=doubles(0.0, 0.5, 1.0), centering=0.01
    )

    expected = [
        -math.log(sigmoid(c - r - m)) + 0.01 * (c + r) ** 2
        for c, r, m in zip(CHOSEN, REJECTED, [0.0, 0.5, 1.0], strict=True)
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda c, r: dpo_losses(c, r, beta=0.3, label_smoothing=0.1),
        lambda c, r: ipo_losses(c, r, beta=0.3),
        lambda c, r: bradley_terry_losses(c, r, centering=0.1),
        lambda c, r: kto_losses(c, r > 0, c.new_tensor(0.1), beta=0.7, weights=(1.0, 2.0)),
    ],
)
def test_gradients_equal_finite_differences(loss):
    chosen, rejected = doubles(*CHOSEN), doubles(*REJECTED)

    assert torch.autograd.gradcheck(lambda c: loss(c, rejected), chosen.requires_grad_())


class TinyModel(nn.Module):
    """Each token predicts the next by itself; ``num_outputs`` of 7 is a language model."""

    config = None

    def __init__(self, num_outputs=7, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, num_outputs)

    def get_output_embeddings(self):
        return nn.Identity()

    def forward(self, input_ids, use_cache=False):
        class Output:
            logits = self.embed(input_ids)

        return Output


def tokens(*ids, prompt=1, name="s"):
    return LabelledTokens(
        token_ids=np.array(ids, np.int32), trainable=np.arange(len(ids)) >= prompt, name=name
    )


PAIRS = [(tokens(1, 2, 3), tokens(1, 4)), (tokens(2, 5, 5, 6, prompt=2), tokens(2, 5, 0, prompt=2))]


def log_likelihood(model, sample):
    logp = model.embed.weight.log_softmax(-1)
    ids = sample.token_ids.tolist()
    return sum(logp[ids[t - 1], ids[t]] for t in range(1, len(ids)) if sample.trainable[t])


@pytest.mark.parametrize("form", ["sigmoid", "squared"])
def test_dpo_of_a_model_equals_a_loop_over_its_pairs(form):
    model, reference = TinyModel(), TinyModel(seed=1)
    config = DpoConfig(form=form, beta=0.5)

    part = config.loss(model, config.with_reference(reference, collate_pairs(PAIRS)))

    expected = 0.0
    for pair in PAIRS:
        h = [(log_likelihood(model, s) - log_likelihood(reference, s)).item() for s in pair]
        if form == "squared":
            h = [x / s.num_trainable for x, s in zip(h, pair, strict=True)]
            expected += (h[0] - h[1] - 1.0) ** 2
        else:
            expected -= math.log(sigmoid(0.5 * (h[0] - h[1])))
    assert part.total.item() == pytest.approx(expected, rel=1e-5)
    assert part.weight.item() == 2.0


@pytest.mark.parametrize("form", ["sigmoid", "squared", "kto"])
def test_what_a_reference_says_of_other_tokens_is_of_no_account(form):
    config = KtoConfig() if form == "kto" else DpoConfig(form=form)
    batch = DpoConfig().with_reference(TinyModel(seed=1), collate_pairs(PAIRS))

    def loss(batch):
        model = TinyModel()
        marked = KtoBatch(
            tokens=batch,
            desirable=torch.tensor([True, False, True, False]),
            baseline=torch.tensor(0.1),
        )
        total = config.loss(model, marked if form == "kto" else batch).total
        total.backward()
        return total.detach(), model.embed.weight.grad

    spoilt = batch.reference_logprobs.masked_fill(~batch.trainable, math.nan)
    torch.testing.assert_close(
        loss(replace(batch, reference_logprobs=spoilt)), loss(batch), rtol=0, atol=0
    )


def test_pairs_in_two_batches_have_the_gradient_of_one():
    config, reference = DpoConfig(), TinyModel(seed=1)
    gradients = []
    for batches in ([PAIRS], [PAIRS[:1], PAIRS[1:]]):
        model = TinyModel()
        for pairs in batches:
            config.loss(
                model, config.with_reference(reference, collate_pairs(pairs))
            ).total.backward()
        gradients.append(model.embed.weight.grad)

    torch.testing.assert_close(gradients[0], gradients[1])


def test_an_empty_pair_of_rows_adds_zeros_to_dpo():
    config = DpoConfig()
    empty = replace(empty_batch(num_rows=2), reference_logprobs=torch.zeros(2, 2))

    part = config.loss(TinyModel(), empty)
    part.total.backward()

    assert (part.total.item(), part.weight.item()) == (0.0, 0.0)


def test_kto_of_a_model_equals_a_loop_over_its_samples():
    model, reference = TinyModel(), TinyModel(seed=1)
    samples = [sample for pair in PAIRS for sample in pair]
    ones = [1, 1, 1, 1]
    weights = sample_weights(ones, ones, AggregationConfig(mode="sequence_sum"))
    batch = KtoConfig().with_reference(reference, collate_labelled(samples, weights))
    desirable = torch.tensor([True, False, True, False])

    part = KtoConfig(beta=0.5).loss(
        model, KtoBatch(tokens=batch, desirable=desirable, baseline=torch.tensor(0.3)).to("cpu")
    )

    expected = 0.0
    for sample, good in zip(samples, desirable.tolist(), strict=True):
        h = (log_likelihood(model, sample) - log_likelihood(reference, sample)).item()
        expected += 1 - sigmoid(0.5 * (h - 0.3) * (1 if good else -1))
    assert part.total.item() == pytest.approx(expected, rel=1e-5)
    assert part.weight.item() == 4.0


def test_the_reward_is_the_output_at_the_last_token_of_a_row():
    model = TinyModel(num_outputs=1)

    rewards = RewardModelConfig().rewards(model, collate_pairs(PAIRS))

    last = model.embed.weight[[3, 4, 6, 0], 0]
    assert torch.equal(rewards, last)


@pytest.mark.parametrize("has_value_head", [True, False])
def test_rows_that_a_reward_model_would_misread_are_refused(has_value_head):
    model = TinyModel(num_outputs=1)
    if has_value_head:
        model.value_head = nn.Linear(1, 1)
    batch = collate_pairs(PAIRS)
    padded_left = replace(batch, valid=batch.valid.flip(1))

    with pytest.raises(ShapeError, match="rows must be right-padded"):
        RewardModelConfig().rewards(model, padded_left)


def test_a_reward_model_learns_the_margin():
    model = TinyModel(num_outputs=1)

    part = RewardModelConfig().loss(model, collate_pairs(PAIRS))

    r = model.embed.weight[:, 0].tolist()
    expected = -math.log(sigmoid(r[3] - r[4])) - math.log(sigmoid(r[6] - r[0]))
    assert part.total.item() == pytest.approx(expected, rel=1e-5)
    figures = {name: value.item() for name, value in part.metrics.items()}
    assert figures == pytest.approx(
        {
            "pairs": 2.0,
            "accuracy": float(r[3] > r[4]) + float(r[6] > r[0]),
            "margin": r[3] - r[4] + r[6] - r[0],
            "chosen": r[3] + r[6],
            "rejected": r[4] + r[0],
        },
        rel=1e-5,
    )


def test_sft_is_the_negative_log_likelihood_of_the_marked_tokens():
    model = TinyModel()
    samples = [PAIRS[0][0], PAIRS[1][0]]
    weights = sample_weights([2, 2], [0, 1], AggregationConfig())

    part = SftConfig().loss(model, collate_labelled(samples, weights))

    expected = -sum(log_likelihood(model, sample) for sample in samples)
    torch.testing.assert_close(part.total, expected)
    assert part.weight.item() == part.metrics["tokens"].item() == 4.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: DpoConfig().loss(TinyModel(), collate_pairs(PAIRS)),
            MissingScoresError,
            r"dpo needs the batch's reference_logprobs; it has none \(first sample: s\)",
        ),
        (
            lambda: collate_pairs([(tokens(1, 2, prompt=2, name="a7"), tokens(1, 3))]),
            PairingError,
            "pair 0: a7 has no trainable token",
        ),
        (
            lambda: RewardModelConfig().loss(TinyModel(num_outputs=1), empty_batch(num_rows=3)),
            PairingError,
            "3 rows do not form pairs",
        ),
        (
            lambda: collate_pairs([(tokens(1, 9, name="a7"), tokens(1, 2))], vocab_size=7),
            TokenIdError,
            "a7: token 1 is 9; token ids are 0 to 6",
        ),
        (lambda: tokens(1, 2, prompt=0, name="a7"), TrajectoryError, "a7: token 0 is trainable"),
        (
            lambda: dpo_losses(doubles(1.0), doubles(0.0), beta=0.1, label_smoothing=0.5),
            AlgorithmConfigError,
            r"label_smoothing 0.5 must be in \[0, 0.5\)",
        ),
        (
            lambda: DpoConfig(label_smoothing=-0.1),
            AlgorithmConfigError,
            r"label_smoothing -0.1 must be in \[0, 0.5\)",
        ),
        (lambda: DpoConfig(beta=0.0), AlgorithmConfigError, "beta 0.0 must be above 0"),
        (
            lambda: DpoConfig(form="squared", label_smoothing=0.1),
            AlgorithmConfigError,
            "label_smoothing 0.1 is of form 'sigmoid'",
        ),
        (lambda: DpoConfig(beta=math.inf), AlgorithmConfigError, "beta inf must be .* finite"),
        (lambda: DpoConfig(logprob_chunk=-1), AlgorithmConfigError, "logprob_chunk -1 must"),
        (lambda: KtoConfig(logprob_chunk=-1), AlgorithmConfigError, "logprob_chunk -1 must"),
        (lambda: KtoConfig(beta=0.0), AlgorithmConfigError, "kto: beta 0.0 must be above 0"),
        (lambda: KtoConfig(desirable_weight=-1.0), AlgorithmConfigError, "desirable_weight -1.0"),
        (
            lambda: KtoConfig(desirable_weight=0.0, undesirable_weight=0.0),
            AlgorithmConfigError,
            "both weights are 0",
        ),
        (
            lambda: RewardModelConfig(centering=-1.0),
            AlgorithmConfigError,
            "centering -1.0 must be 0 or more",
        ),
    ],
)
def test_what_cannot_be_compared_is_an_error_that_names_it(make, error, message):
    with pytest.raises(error, match=message):
        make()
