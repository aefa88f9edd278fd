"""Denoisers that divide the noise levels among themselves, and are trained and called as one.

    x, timestep ─► rows at or above the boundary ─► transformer   ─┐
                   the other rows                ─► transformer_2 ─┴─► rows in their own order

A denoiser that no row is for is not called, has no gradient, and is not changed by the step. Ranks
that share weights agree first on which are called: one without rows for a denoiser that another
needs gives it a row whose result counts 0, so that all gather its weights together.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cosmos_parallel import TrainingMesh
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.errors import PipelineError


class NoiseExperts(nn.Module):
    """Two denoisers of one kind, each a child under its name in the pipeline.

    Attributes:
        boundary: timestep from which on the first is asked, the second below.
    """

    def __init__(self, first: nn.Module, second: nn.Module, *, boundary: float) -> None:
        """Hold two denoisers, which stay the pipeline's own.

        Args:
            first: ``transformer``, for the high levels.
            second: ``transformer_2``, for the low ones.
            boundary: timestep that divides them, in the denoisers' own units.

        Raises:
            PipelineError: if one of them is not there.
        """
        super().__init__()
        if cast("object", first) is None or cast("object", second) is None:
            raise PipelineError(
                "this pipeline has a boundary_ratio, which divides the noise levels between "
                "transformer and transformer_2, but not both of them"
            )
        self.transformer = first
        self.transformer_2 = second
        self.boundary = boundary
        # under the name that diffusers' models have it by
        self._keep_in_fp32_modules = [*(getattr(first, "_keep_in_fp32_modules", None) or ())]
        self._mesh: TrainingMesh | None = None

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """The denoisers by their names in the pipeline."""
        return dict(self.named_children())

    def asks_first(self, timestep: Float[Tensor, " B"]) -> Bool[Tensor, " B"]:
        """Return which samples the first denoiser is asked about."""
        return timestep >= self.boundary

    def share(self, mesh: TrainingMesh) -> None:
        """Agree with the ranks of a mesh, from now on, on which denoisers are called."""
        self._mesh = mesh

    def forward(
        self, hidden_states: Float[Tensor, "B C *s"], timestep: Tensor, **named: Any
    ) -> tuple[Float[Tensor, "B C *s"]]:
        """Call each denoiser on its rows.

        Args:
            hidden_states: x_t.
            timestep: of each sample, [B], or of each of its tokens, [B, L].
            **named: the denoisers' other arguments; tensors have a row for each sample.
        """
        is_first = self.asks_first(timestep if timestep.dim() == 1 else timestep.amax(1))
        called = torch.stack([is_first.any(), (~is_first).any()]).int()
        if self._mesh is not None:
            self._mesh.max_(called)
        result = torch.zeros_like(hidden_states)
        for part, chosen, needed in zip(
            self.children(), (is_first, ~is_first), called.tolist(), strict=True
        ):
            if needed:
                given = {"hidden_states": hidden_states, "timestep": timestep, **named}
                result = _add_rows(result, part, given, chosen)
        return (result,)


def denoisers_of(adapter: DiffusionModelAdapter) -> Mapping[str, nn.Module]:
    """Return the modules that an adapter's denoiser consists of, by their names in the pipeline."""
    module = adapter.transformer
    return module.parts if isinstance(module, NoiseExperts) else {adapter.denoiser: module}


def own_state(
    adapter: DiffusionModelAdapter, state: Mapping[str, Tensor], name: str
) -> dict[str, Tensor]:
    """Return what of a denoiser's state belongs to the module ``name``, by its own names."""
    if not isinstance(adapter.transformer, NoiseExperts):
        return dict(state)
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _add_rows(
    result: Tensor, part: nn.Module, given: Mapping[str, Any], chosen: Tensor
) -> Float[Tensor, "B C *s"]:
    """Return ``result`` with the rows that a denoiser was chosen for."""
    rows = chosen.nonzero().flatten()
    counted = len(rows) > 0
    if not counted:
        rows = torch.zeros(1, dtype=torch.long, device=chosen.device)
    own = {
        name: value.index_select(0, rows) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    predicted = part(**own)[0]
    return result.index_add(0, rows, (predicted if counted else 0.0 * predicted).to(result.dtype))
