"""On-policy distillation from a teacher's likeliest tokens, against float64 loops over tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from cosmos_algos import (
    AlgorithmConfigError,
    MissingScoresError,
    NoCorrection,
    ObjectiveConfig,
    OnPolicyDistillationConfig,
    Share,
    TisConfig,
    empty_batch,
    in_one_row,
    policy_loss,
)
from cosmos_algos.scoring import scores_and_candidates, scores_and_likeliest
from cosmos_core.trajectory import TeacherScores, Trajectory, VersionSpan

VOCABULARY, WIDTH = 11, 6


class TinyModel(nn.Module):
    """The distribution of a token depends on the token before it, through hidden states."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.8, generator=generator)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids, **_):
        class Output:
            logits = self.head(self.embed(input_ids).tanh())

        return Output

    def rows(self, token_id: int) -> list[float]:
        """Probabilities of what follows a token."""
        return self(torch.tensor([[token_id]])).logits[0, 0].softmax(-1).tolist()


def samples(ratio: float = 0.0) -> list[Trajectory]:
    """Two answers, of three tokens and of one, which their sampler found likely by ``ratio``."""
    model, found = TinyModel(0), []
    for sibling, (tokens, num_prompt) in enumerate((([1, 2, 3, 4, 5], 2), ([6, 7], 1))):
        trainable = np.arange(len(tokens)) >= num_prompt
        logprobs = [
            math.log(model.rows(before)[token]) - ratio
            for before, token in zip([0, *tokens[:-1]], tokens, strict=True)
        ]
        found.append(
            Trajectory(
                prompt_id="p",
                group="g",
                sibling=sibling,
                attempt=0,
                token_ids=np.array(tokens, np.int32),
                logprobs=np.where(trainable, logprobs, 0.0).astype(np.float32),
                trainable=trainable,
                versions=(VersionSpan(-1, num_prompt), VersionSpan(0, len(tokens) - num_prompt)),
                rewards={"r": float(sibling)},
                reward=float(sibling),
                finish_reason="stop",
            )
        )
    return found


def batch_of(config: OnPolicyDistillationConfig, ratio: float = 0.0, **more):
    (batch,) = config.build().batches(
        samples(ratio), Share(max_tokens=100, **more), policy_version=0
    )
    return config.build().with_teacher(TinyModel(1), batch)


def loop(config: OnPolicyDistillationConfig, ratio: float = 0.0) -> float:
    """The loss from the formula, a token at a time: mean of w_t β KL(P‖M) + (1-β) KL(Q‖M)."""
    teacher, student, beta = TinyModel(1), TinyModel(0), config.beta
    terms = []
    for sample in samples():
        ids = sample.token_ids.tolist()
        for place in range(1, len(ids)):
            if not sample.trainable[place]:
                continue
            p, q = teacher.rows(ids[place - 1]), student.rows(ids[place - 1])
            best = sorted(range(VOCABULARY), key=lambda v: -p[v])[: config.top_k]
            p = [p[v] for v in best] + [1.0 - sum(p[v] for v in best)]
            q = [q[v] for v in best] + [1.0 - sum(q[v] for v in best)]
            m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
            kl = lambda a, b: sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))  # noqa: E731
            if beta in {0.0, 1.0}:
                jsd = kl(p, q) if beta == 0.0 else kl(q, p)
            else:
                jsd = beta * kl(p, m) + (1 - beta) * kl(q, m)
            terms.append(min(math.exp(ratio), 2.0) * jsd)
    return config.objective.teacher_coefficient * sum(terms) / len(terms)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [1, 4, VOCABULARY - 1])
@pytest.mark.parametrize("chunk", [0, 2, 256])
def test_the_loss_is_the_mean_divergence_of_the_teachers_likeliest_tokens(beta, top_k, chunk):
    config = OnPolicyDistillationConfig(beta=beta, top_k=top_k, logprob_chunk=chunk)
    part = policy_loss(config)(TinyModel(0), batch_of(config))

    assert part.total.item() / part.weight.item() == pytest.approx(loop(config), rel=1e-6)
    assert part.metrics["divergence"].item() / 4 == pytest.approx(loop(config), rel=1e-6)


@pytest.mark.parametrize("ratio", [-0.5, 0.3, 3.0])
def test_stale_samples_are_weighed_by_their_truncated_ratio(ratio):
    objective = ObjectiveConfig(teacher_coefficient=0.5, correction=TisConfig(cap=2.0))
    config = OnPolicyDistillationConfig(top_k=3, objective=objective)
    part = policy_loss(config)(TinyModel(0), batch_of(config, ratio))

    assert part.total.item() / part.weight.item() == pytest.approx(loop(config, ratio), rel=1e-5)


def test_the_gradient_is_that_of_the_loss_by_finite_differences():
    # no correction: its weights are held where they are, and no part of the gradient
    objective = ObjectiveConfig(teacher_coefficient=1.0, correction=NoCorrection())
    config = OnPolicyDistillationConfig(top_k=3, beta=0.4, objective=objective)
    batch, model, step = batch_of(config), TinyModel(0), 1e-6
    policy_loss(config)(model, batch).total.backward()
    for parameter in (model.head.weight, model.embed.weight):
        index = int(parameter.grad.abs().argmax())
        sides = []
        for sign in (1, -1):
            moved = TinyModel(0)
            twin = dict(moved.named_parameters())[
                next(n for n, p in model.named_parameters() if p is parameter)
            ]
            twin.data.view(-1)[index] += sign * step
            sides.append(policy_loss(config)(moved, batch).total.item())
        slope = (sides[0] - sides[1]) / (2 * step)
        assert parameter.grad.view(-1)[index].item() == pytest.approx(slope, rel=1e-5)


def test_samples_in_one_row_have_the_loss_of_padded_ones():
    config = OnPolicyDistillationConfig(top_k=3)
    batch = batch_of(config)
    padded = policy_loss(config)(TinyModel(0), batch)
    packed = policy_loss(config)(TinyModel(0), in_one_row(batch))

    assert packed.total.item() == pytest.approx(padded.total.item(), rel=1e-6)


@pytest.mark.parametrize("chunk", [0, 2])
def test_the_likeliest_tokens_are_those_of_the_whole_distribution(chunk):
    (batch,) = (
        OnPolicyDistillationConfig()
        .build()
        .batches(samples(), Share(max_tokens=100), policy_version=0)
    )
    teacher = TinyModel(1)
    scores, top = scores_and_likeliest(teacher, batch, 3, temperature=0.7, chunk=chunk)

    whole = (teacher(batch.token_ids).logits / 0.7).log_softmax(-1)
    best = whole.topk(3, dim=-1)
    kept = batch.trainable
    torch.testing.assert_close(top.logprobs[kept], best.values[kept])
    assert torch.equal(top.token_ids[kept], best.indices[kept])
    assert not top.logprobs[~kept].any()
    again, same = scores_and_candidates(teacher, batch, top.token_ids, temperature=0.7, chunk=chunk)
    torch.testing.assert_close(same, top.logprobs)
    torch.testing.assert_close(again, scores)


def test_what_teachers_beside_the_rollouts_said_is_learned_from_as_what_a_module_says():
    config = OnPolicyDistillationConfig(top_k=3)
    module = batch_of(config)
    scored = []
    for row, sample in enumerate(samples()):
        steps = sample.num_tokens
        # a column is about the token after it
        said = [
            np.roll(array[row, :steps].numpy(), 1, axis=0)
            for array in (
                module.teacher_logprobs.float(),
                module.teacher_top_logprobs.float(),
                module.teacher_top_token_ids.int(),
            )
        ]
        teacher = TeacherScores(logprobs=said[0], top_logprobs=said[1], top_token_ids=said[2])
        scored.append(replace(sample, teacher=teacher.where(sample.trainable)))
    (batch,) = config.build().batches(scored, Share(max_tokens=100), policy_version=0)

    assert torch.equal(batch.teacher_top_token_ids, module.teacher_top_token_ids)
    part = policy_loss(config)(TinyModel(0), batch)
    assert part.total.item() == pytest.approx(
        policy_loss(config)(TinyModel(0), module).total.item(), rel=1e-5
    )
    (plain,) = config.build().batches(samples(), Share(max_tokens=100), policy_version=0)
    assert plain.teacher_top_logprobs is None


def test_a_rank_without_samples_adds_exact_zeros():
    config = OnPolicyDistillationConfig(top_k=3)
    model = TinyModel(0)
    part = policy_loss(config)(model, empty_batch())
    part.total.backward()

    assert part.total.item() == 0.0
    assert not model.head.weight.grad.any()
    assert set(part.metrics) == set(policy_loss(config)(model, batch_of(config)).metrics)


def test_what_is_missing_is_named():
    config = OnPolicyDistillationConfig(top_k=3)
    batch = batch_of(config)
    without = replace(batch, teacher_top_logprobs=None)
    with pytest.raises(MissingScoresError, match=r"the batch has none \(first sample: group g"):
        policy_loss(config)(TinyModel(0), without)
    with pytest.raises(MissingScoresError, match=r"top_k 4 needs as many .* has 3 of each"):
        policy_loss(replace(config, top_k=4))(TinyModel(0), batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": -1}, "top_k -1 must be 1 or more"),
        ({"top_k": 2, "beta": 1.5}, r"beta 1.5 in \[0, 1\]"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(AlgorithmConfigError, match=message):
        OnPolicyDistillationConfig(**settings).build()


def test_more_likely_tokens_than_the_vocabulary_has_are_refused():
    with pytest.raises(AlgorithmConfigError, match="top_k 12: the distribution has 11 tokens"):
        batch_of(OnPolicyDistillationConfig(top_k=12))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [0, 2])
def test_what_a_teacher_finds_likeliest_may_be_padding_that_the_policy_has_not(beta, chunk):
    config = OnPolicyDistillationConfig(beta=beta, top_k=3, logprob_chunk=chunk)
    batch = batch_of(config)
    # the third likeliest of each place is a row that only the teacher has
    padding = batch.teacher_top_token_ids.clone()
    padding[..., 2] = VOCABULARY + 4
    model, other = TinyModel(0), TinyModel(0)
    found = policy_loss(config)(model, replace(batch, teacher_top_token_ids=padding))

    few = replace(config, top_k=2)
    expected = policy_loss(few)(
        other,
        replace(
            batch,
            teacher_top_logprobs=batch.teacher_top_logprobs[..., :2],
            teacher_top_token_ids=batch.teacher_top_token_ids[..., :2],
        ),
    )
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-6)
    found.total.backward()
    expected.total.backward()
    torch.testing.assert_close(model.head.weight.grad, other.head.weight.grad)
