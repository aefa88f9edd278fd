"""The gated delta rule and a causal convolution of samples of any length, in torch on any device.

The rule (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, section 3.3): a state S [K, V] of
a head decays by a_t, and is corrected towards v_t where it is looked up by k_t,

    S_t = a_t (I - b_t k_t k_t') S_{t-1} + b_t k_t v_t',     o_t = S_t' q_t.

It is computed chunk by chunk: inside one by a triangular system, from one to the next by S.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

_CHUNK = 64
_NORM_EPS = 1e-6  # of queries and keys, as in fla's kernels and in transformers


def by_sample(
    function: Callable[..., Tensor], offsets: Sequence[int], *sequences: Tensor
) -> Tensor:
    """Return what a causal function makes of each sample by itself.

    Args:
        function: of sequences [samples, T, ...], padded behind with zeros; returns one such.
        offsets: where samples begin, and at last where they end.
        sequences: [1, T, ...] each, sample after sample.
    """
    lengths = [end - start for start, end in pairwise(offsets)]
    padded = (pad_sequence(list(whole[0].split(lengths)), batch_first=True) for whole in sequences)
    computed = function(*padded)
    rows = zip(computed, lengths, strict=True)
    return torch.cat([row[:length] for row, length in rows])[None]


def causal_convolution(sequence: Tensor, weight: Tensor) -> Tensor:
    """Return SiLU of each channel's weighted sum over the last tokens.

    Args:
        sequence: [S, T, C].
        weight: [C, 1, W]; its last column is of the token itself.
    """
    channels = functional.pad(sequence.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return functional.silu(functional.conv1d(channels, weight, groups=len(weight))).transpose(1, 2)


def gated_delta_rule(
    queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, rate: Tensor
) -> Tensor:
    """Return [S, T, N, V]; float32 inside, or wider where values are.

    Args:
        queries: [S, T, N, K], of any length: they are normalised, as keys are.
        keys: [S, T, N, K].
        values: [S, T, N, V].
        log_decay: [S, T, N], the logarithm of a, at most 0.
        rate: [S, T, N], b.
    """
    length = values.shape[1]
    size = min(_CHUNK, length)
    exact = torch.promote_types(values.dtype, torch.float32)

    def chunks(whole: Tensor) -> Tensor:  # [S, N, chunks, size, ...]
        padding = (0, 0) * (whole.ndim - 2) + (0, -length % size)
        return functional.pad(whole.to(exact), padding).unflatten(1, (-1, size)).movedim(3, 1)

    q, k, v = chunks(queries), chunks(keys), chunks(values)
    g, b = chunks(log_decay).cumsum(-1), chunks(rate)[..., None]
    q = _normalised(q) * q.shape[-1] ** -0.5
    k = _normalised(k)
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    # between two tokens of a chunk; masked before it is exponentiated, where it would overflow
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(later, -torch.inf).exp()
    since_start = g.exp()[..., None]
    # each token's correction, of what earlier ones of the chunk have left and of what S had
    system = ((b * k) @ k.transpose(-1, -2) * decay).tril(-1)
    wanted = torch.cat([b * v, b * k * since_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    written, looked_up = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside, from_start = q @ k.transpose(-1, -2) * decay, q * since_start
    to_end = k * (g[..., -1:] - g).exp()[..., None]
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs: list[Tensor] = []
    for chunk in range(v.shape[2]):
        new = written[:, :, chunk] - looked_up[:, :, chunk] @ state
        outputs.append(from_start[:, :, chunk] @ state + inside[:, :, chunk] @ new)
        left = state * since_start[:, :, chunk, -1:]
        state = left + to_end[:, :, chunk].transpose(-1, -2) @ new
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2).type_as(values)


def _normalised(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _NORM_EPS)
