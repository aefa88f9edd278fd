"""Divergences to a teacher: whole, of the K likeliest tokens, and from hidden states in chunks."""

import math

import pytest
import torch

from cosmos_algos import (
    AlgorithmConfigError,
    DistillationConfig,
    candidate_logprobs,
    generalised_jsd,
    top_k,
    top_k_jsd,
    with_tail,
)


def distributions(seed=0, rows=4, vocabulary=6):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


def loop_jsd(p, q, beta):
    kl = lambda a, b: sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))  # noqa: E731
    if beta == 0.0:
        return kl(p, q)
    if beta == 1.0:
        return kl(q, p)
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_equals_its_formula(beta):
    teacher, student = distributions()

    found = generalised_jsd(teacher, student, beta)

    rows = zip(teacher.exp().tolist(), student.exp().tolist(), strict=True)
    assert found.tolist() == pytest.approx([loop_jsd(p, q, beta) for p, q in rows], rel=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradients_equal_finite_differences(beta):
    teacher, student = distributions(seed=1)

    assert torch.autograd.gradcheck(
        lambda z: top_k_jsd(teacher[..., :3], z.log_softmax(-1)[..., :3], beta),
        student.clone().requires_grad_(),
    )


def test_towards_the_ends_the_divergence_per_beta_is_forward_or_reverse():
    teacher, student = distributions(seed=2)

    near = generalised_jsd(teacher, student, 1e-6) / 1e-6
    torch.testing.assert_close(near, generalised_jsd(teacher, student, 0.0), rtol=1e-4, atol=0)

    near = generalised_jsd(teacher, student, 1 - 1e-6) / 1e-6
    torch.testing.assert_close(near, generalised_jsd(teacher, student, 1.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_likeliest_tokens_and_their_tail_bound_the_whole_from_below(beta):
    teacher, student = distributions(seed=3)
    whole = generalised_jsd(teacher, student, beta)

    for k in (1, 3, 5):
        logprobs, ids = top_k(teacher, k)
        part = top_k_jsd(logprobs, student.gather(-1, ids), beta)
        assert (part <= whole + 1e-12).all()
        assert (part >= 0.0).all()
    # With all tokens but one, the tail is that one.
    torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_likeliest_of_bfloat16_logits_have_the_log_probs_of_float32(temperature):
    generator = torch.Generator().manual_seed(3)
    logits = (4.0 * torch.randn(5, 40, generator=generator)).bfloat16()

    found = top_k(logits, 8, temperature=temperature)

    exact = torch.log_softmax(logits.double() / temperature, dim=-1)
    torch.testing.assert_close(
        found.logprobs, exact.gather(-1, found.token_ids).float(), atol=1e-5, rtol=0
    )
    left = 1.0 - exact.exp().gather(-1, found.token_ids).sum(-1)
    torch.testing.assert_close(
        with_tail(found.logprobs)[:, -1].exp(), left.float(), atol=1e-6, rtol=0
    )


def test_the_tail_is_what_is_left():
    tail = with_tail(torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()).exp()

    assert tail.tolist() == [[pytest.approx(0.5), pytest.approx(0.25), pytest.approx(0.25)]]


def test_a_teacher_that_is_certain_leaves_a_finite_tail():
    certain = torch.zeros(1, 1)

    assert with_tail(certain).isfinite().all()
    assert top_k_jsd(certain, certain - 1.0, 0.5).isfinite().all()


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_candidates_in_chunks_equal_those_of_whole_logits(chunk):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(5, 3, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 3, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(7, (5, 2), generator=generator)

    chunked = candidate_logprobs(hidden, weight, ids, temperature=0.7, chunk=chunk)
    whole = (hidden @ weight.T / 0.7).log_softmax(-1).gather(-1, ids)

    torch.testing.assert_close(chunked, whole)
    factors = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((chunked * factors).sum(), [hidden, weight]),
        torch.autograd.grad((whole * factors).sum(), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_what_neither_can_say_has_no_part_and_no_gradient(beta):
    generator = torch.Generator().manual_seed(5)
    teacher, student = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    masked = torch.nn.functional.pad(student, (0, 1), value=-torch.inf)
    never = torch.nn.functional.pad(teacher, (0, 1), value=-torch.inf)

    found = generalised_jsd(never.log_softmax(-1), masked.log_softmax(-1), beta)
    expected = generalised_jsd(teacher.log_softmax(-1), student.log_softmax(-1), beta)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(losses.sum(), student)[0] for losses in (found, expected))
    )


def test_a_beta_outside_0_to_1_is_refused():
    teacher, student = distributions()
    with pytest.raises(AlgorithmConfigError, match=r"beta 1\.5"):
        generalised_jsd(teacher, student, 1.5)


def test_losses_of_what_is_kept_of_a_teacher_are_those_of_its_logits():
    teacher, student = distributions(seed=3)
    targets = torch.tensor([0, 1, 2, 3])
    config = DistillationConfig(beta=0.3, top_k=4, temperature=2.0, likelihood_coefficient=0.5)
    few = config.likeliest(teacher)
    assert few is not None
    assert few.token_ids.shape == (4, 4)
    torch.testing.assert_close(
        config.token_losses(few, student, targets), config.token_losses(teacher, student, targets)
    )
    # of whole distributions nothing less than the logits will do
    assert DistillationConfig().likeliest(teacher) is None
    assert DistillationConfig(top_k=6).likeliest(teacher) is None


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_likeliest_token_that_the_student_has_not_is_one_of_the_others(beta):
    teacher, student = torch.tensor([0.1, 0.25, 0.15, 0.5]), torch.tensor([0.2, 0.3, 0.5])
    logits = student.double().log()[None].requires_grad_()
    config = DistillationConfig(beta=beta, top_k=2)  # the likeliest two are 3, which is padding, 1

    found = config.token_losses(teacher.double().log()[None], logits, torch.tensor([0]))
    expected = generalised_jsd(  # of token 1 and all others, 3 included, or not there
        torch.tensor([0.25, 0.75]).double().log(), torch.tensor([0.3, 0.7]).double().log(), beta
    )

    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-8)
    assert torch.autograd.grad(found.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("more", ["teacher", "student"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_whole_distributions_are_over_the_tokens_that_both_have(more, beta):
    teacher, student = distributions(seed=6)
    config = DistillationConfig(beta=beta)
    targets = torch.tensor([0, 1, 2, 3])
    padded = {"teacher": teacher, "student": student}
    padded[more] = torch.nn.functional.pad(padded[more], (0, 3), value=0.5)

    torch.testing.assert_close(
        config.token_losses(padded["teacher"], padded["student"], targets),
        config.token_losses(teacher, student, targets),
    )
