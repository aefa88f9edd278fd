"""The gated delta rule in chunks against the recurrence that it stands for, and samples apart."""

import subprocess
import sys

import pytest
import torch

from cosmos_parallel.native.delta_rule import (
    apart,
    causal_convolution,
    delta_response,
    gated_delta_rule,
    together,
)


def step_by_step(queries, keys, values, log_decay, rate):
    """Yang et al. 2024, equation 10, token by token."""
    queries, keys = (
        each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (queries, keys)
    )
    state = torch.zeros(*values.shape[::2], keys.shape[-1], values.shape[-1]).to(values)
    outputs = []
    for token in range(values.shape[1]):
        state = state * log_decay[:, token, :, None, None].exp()
        key, value = keys[:, token, :, :, None], values[:, token, :, None, :]
        error = value - key.transpose(-1, -2) @ state
        state = state + rate[:, token, :, None, None] * key @ error
        outputs.append(queries[:, token, :, None, :] @ state * queries.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).squeeze(-2)


def drawn(length):
    generator = torch.Generator().manual_seed(length)
    normal = [
        torch.randn(2, length, 3, width, generator=generator, dtype=torch.float64)
        for width in (4, 4, 5)
    ]
    rates = [torch.rand(2, length, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    # up to a decay that leaves nothing: exp(-40)
    return [*normal, -40 * rates[0] ** 4, rates[1]]


@pytest.mark.parametrize("length", [1, 13, 64, 150])
def test_chunks_are_the_recurrence_and_so_are_their_gradients(length):
    found, expected = ([each.requires_grad_() for each in drawn(length)] for _ in range(2))
    outputs = gated_delta_rule(*found), step_by_step(*expected)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        output.square().sum().backward()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cut", [1, 30, 64, 100, 149])
def test_a_sample_goes_on_from_a_state_that_was_not_known(cut):
    given = drawn(150)
    whole = gated_delta_rule(*given)
    both = torch.arange(2)
    start = delta_response(both, *(each[:, :cut] for each in given))
    rest = delta_response(both[1:], *(each[:, cut:] for each in given))
    found = rest.outputs[1] + torch.einsum("tnk,nkv->tnv", rest.asked[0], start.state[1])
    torch.testing.assert_close(start.outputs, whole[:, :cut], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, whole[1, cut:], rtol=1e-12, atol=1e-12)
    end = rest.state[1] + rest.transition[0] @ start.state[1]
    torch.testing.assert_close(end, delta_response(both, *given).state[1], rtol=1e-12, atol=1e-12)


def test_samples_of_one_sequence_do_not_see_each_other():
    offsets = (0, 70, 71, 150)
    given = [each[:1] for each in drawn(150)]
    channels = given[2].flatten(2)
    weight = torch.randn(channels.shape[-1], 1, 4, dtype=torch.float64)
    rule = together(gated_delta_rule(*apart(offsets, *given)), offsets)
    convolved = together(causal_convolution(*apart(offsets, channels), weight), offsets)
    for start, end in ((0, 70), (70, 71), (71, 150)):
        alone = gated_delta_rule(*(each[:, start:end] for each in given))
        torch.testing.assert_close(rule[:, start:end], alone)
        torch.testing.assert_close(
            convolved[:, start:end], causal_convolution(channels[:, start:end], weight)
        )


def test_the_convolution_ends_at_the_token_itself():
    sequence = torch.tensor([[[1.0], [10.0], [100.0]]])
    weight = torch.tensor([[[2.0, 1.0]]])  # twice the token before
    found = causal_convolution(sequence, weight).flatten()
    torch.testing.assert_close(found, torch.nn.functional.silu(torch.tensor([1.0, 12.0, 120.0])))


def test_nothing_is_left_of_the_names_that_stand_for_fla():
    program = """
import sys
from cosmos_parallel.titan import prepare
prepare("cpu")
from cosmos_parallel.native.without_fla import fla_or_its_names, has_fla
with fla_or_its_names():
    import torchtitan.models.qwen3_5.model
assert has_fla() or not [name for name in sys.modules if name.split(".")[0] == "fla"]
from transformers.utils import is_flash_linear_attention_available
print(is_flash_linear_attention_available() == has_fla())
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout == "True\n", told.stderr
