"""The gated delta rule and a causal convolution of samples of any length, in torch on any device.

The rule (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, section 3.3): a state S [K, V] of
a head decays by a_t, and is corrected towards v_t where it is looked up by k_t,

    S_t = a_t (I - b_t k_t k_t') S_{t-1} + b_t k_t v_t',     o_t = S_t' q_t.

It is computed chunk by chunk: inside one by a triangular system, from one to the next by S. As S
enters linearly, what samples make of one that is not known yet can be said too (`DeltaResponse`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

_CHUNK = 64
_NORM_EPS = 1e-6  # of queries and keys, as in fla's kernels and in transformers


def apart(offsets: Sequence[int], *rows: Tensor) -> list[Tensor]:
    """Return [samples, T, ...] of each row of samples, padded behind with zeros.

    Args:
        offsets: where samples begin, and at last where they end.
        *rows: [1, T, ...] each, sample after sample.
    """
    lengths = _lengths(offsets)
    return [pad_sequence(list(row[0].split(lengths)), batch_first=True) for row in rows]


def together(samples: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return the row [1, T, ...] of samples that were taken ``apart``."""
    parts = zip(samples, _lengths(offsets), strict=True)
    return torch.cat([sample[:length] for sample, length in parts])[None]


def causal_convolution(sequence: Tensor, weight: Tensor, before: Tensor | None = None) -> Tensor:
    """Return SiLU of each channel's weighted sum over the last tokens.

    Args:
        sequence: [S, T, C].
        weight: [C, 1, W]; its last column is of the token itself.
        before: [S, W - 1, C], the tokens before; ``None`` for zeros.
    """
    reach = weight.shape[-1] - 1
    if before is None:
        before = sequence.new_zeros(len(sequence), reach, sequence.shape[-1])
    channels = torch.cat([before, sequence], dim=1).transpose(1, 2)
    return functional.silu(functional.conv1d(channels, weight, groups=len(weight))).transpose(1, 2)


class DeltaResponse(NamedTuple):
    """What the rule makes of S samples, of which C begin with a state that is not known yet.

    With such a state S, [N, K, V] of each, outputs have ``asked @ S`` added, and the sample ends
    with ``state + transition @ S``.

    Attributes:
        outputs: [S, T, N, V], as of a state of zeros.
        state: [S, N, K, V], with which each ends, likewise.
        asked: [C, T, N, K].
        transition: [C, N, K, K].
    """

    outputs: Tensor
    state: Tensor
    asked: Tensor
    transition: Tensor


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
    chunks = _Chunks.of(queries, keys, values, log_decay, rate)
    outputs, _ = chunks.run(chunks.no_state(), chunks.written)
    return _tokens(outputs, values.shape[1]).type_as(values)


def delta_response(open_samples: Tensor, *sequences: Tensor) -> DeltaResponse:
    """Return what the rule makes of samples; float32, or wider where values are.

    Args:
        open_samples: int64[C], which of the samples begin with a state that is not known yet.
        *sequences: what `gated_delta_rule` takes.
    """
    chunks, length = _Chunks.of(*sequences), sequences[0].shape[1]
    outputs, state = chunks.run(chunks.no_state(), chunks.written)
    # what is looked up of a state of ones on the diagonal, and what is left of it
    chosen = chunks.chosen(open_samples)
    keys = chosen.looked_up.shape[-1]
    ones = torch.eye(keys, dtype=state.dtype, device=state.device)
    nothing = torch.zeros_like(chosen.looked_up)
    asked, transition = chosen.run(ones.expand(*chosen.looked_up.shape[:2], -1, -1), nothing)
    return DeltaResponse(_tokens(outputs, length), state, _tokens(asked, length), transition)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What the rule comes to inside of chunks, whatever the state that each begins with.

    Attributes:
        written: [S, N, chunks, size, V], what tokens write for their values.
        looked_up: [S, N, chunks, size, K], what they write less for what the state has.
        inside: [S, N, chunks, size, size], what their queries find of what is written.
        from_start: [S, N, chunks, size, K], what they find of the state.
        to_end: [S, N, chunks, size, K], under which keys what is written is in the state at last.
        left: [S, N, chunks, 1, 1], how much of the state is.
    """

    written: Tensor
    looked_up: Tensor
    inside: Tensor
    from_start: Tensor
    to_end: Tensor
    left: Tensor

    @classmethod
    def of(
        cls, queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, rate: Tensor
    ) -> "_Chunks":
        """Solve the chunks of what `gated_delta_rule` takes."""
        size = min(_CHUNK, values.shape[1])
        exact = torch.promote_types(values.dtype, torch.float32)

        def chunks(whole: Tensor) -> Tensor:  # [S, N, chunks, size, ...]
            padding = (0, 0) * (whole.ndim - 2) + (0, -whole.shape[1] % size)
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
        return cls(
            written,
            looked_up,
            inside=q @ k.transpose(-1, -2) * decay,
            from_start=q * since_start,
            to_end=k * (g[..., -1:] - g).exp()[..., None],
            left=since_start[..., -1:, :],
        )

    def chosen(self, samples: Tensor) -> "_Chunks":
        """Return those of some samples."""
        parts = (self.written, self.looked_up, self.inside, self.from_start, self.to_end, self.left)
        return _Chunks(*(part.index_select(0, samples) for part in parts))

    def no_state(self) -> Tensor:
        """Return [S, N, K, V] of zeros."""
        samples, heads, _, _, keys = self.looked_up.shape
        return self.written.new_zeros(samples, heads, keys, self.written.shape[-1])

    def run(self, state: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [S, N, chunks * size, W], and the state [S, N, K, W] at the end.

        Args:
            state: at the start, [S, N, K, W].
            written: [S, N, chunks, size, W].
        """
        outputs: list[Tensor] = []
        for chunk in range(written.shape[2]):
            new = written[:, :, chunk] - self.looked_up[:, :, chunk] @ state
            outputs.append(self.from_start[:, :, chunk] @ state + self.inside[:, :, chunk] @ new)
            kept = state * self.left[:, :, chunk]
            state = kept + self.to_end[:, :, chunk].transpose(-1, -2) @ new
        return torch.cat(outputs, dim=2), state


def _tokens(outputs: Tensor, length: int) -> Tensor:
    """Return [S, T, N, W] of [S, N, chunks * size, W]."""
    return outputs[:, :, :length].transpose(1, 2)


def _lengths(offsets: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(offsets)]


def _normalised(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _NORM_EPS)
