"""Samples that several ranks train on together: one has them, the others are handed them.

Over the axis ``cp``; every rank of it calls, as often as the others.
"""

from collections.abc import Callable

import torch.distributed as dist

from cosmos_app.errors import RunError
from cosmos_parallel import TrainingMesh
from cosmos_wfm import Rollout, RolloutMessage, pack_rollout, parse_rollout

_AXIS = "cp"


class SharedSamplesError(RunError):
    """Raised when the rank that takes samples for others could not."""


class SampleSharing:
    """How a rank comes to the samples of its group.

    Attributes:
        is_first: whether this rank takes them.
    """

    def __init__(self, mesh: TrainingMesh) -> None:
        """Find the group; a rank that shares its samples with nobody is first."""
        self._group: dist.ProcessGroup | None = None
        self._device = mesh.process.device
        self.is_first = True
        if mesh.dims is not None and mesh.config.cp > 1:
            self._group = mesh.dims.get_mesh(_AXIS).get_group()
            self.is_first = dist.get_rank(self._group) == 0

    def share(self, take: Callable[[], list[Rollout]]) -> list[Rollout]:
        """Return what the first rank of the group takes, on each of its ranks.

        Raises:
            SharedSamplesError: on the others, if the first has none.
        """
        if self._group is None:
            return take()
        if not self.is_first:
            packed = self._hand_over([], self._group)
            if not packed:
                raise SharedSamplesError(
                    "the first rank of this one's cp group has no samples; see there"
                )
            return [parse_rollout(data).rollout for data in packed]
        try:
            taken = take()
        except BaseException:
            self._hand_over([], self._group)
            raise
        messages = [RolloutMessage(step=0, place=0, rollout=rollout) for rollout in taken]
        self._hand_over([pack_rollout(message) for message in messages], self._group)
        return taken

    def _hand_over(self, packed: list[bytes], group: dist.ProcessGroup) -> list[bytes]:
        """Return what the first rank of the group brings, on each of its ranks."""
        handed = [packed]
        dist.broadcast_object_list(handed, group=group, group_src=0, device=self._device)
        return handed[0]
