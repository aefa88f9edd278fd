"""Several optimizers that look like one to who takes steps, sets rates and keeps states."""

from collections.abc import Callable

import torch


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers over disjoint parameters that look like one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        """Take over the groups and the state of ``parts``."""
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        start = 0
        for part in parts:
            end = start + len(part.param_groups)
            part.param_groups = self.param_groups[start:end]  # the same objects: one lr for both
            part.state = self.state
            start = end

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let each part take its step."""
        assert closure is None, "the learner has computed the gradients"
        for part in self._parts:
            part.step()
