"""Samples that several ranks train on together: one has them, the others are handed them.

Over the axis ``cp``; every rank of it calls, as often as the others.
"""

import torch.distributed as dist

from cosmos_parallel import TrainingMesh
from cosmos_wfm import Rollout, RolloutMessage, pack_rollout, parse_rollout

_AXIS = "cp"


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

    def share(self, taken: list[Rollout]) -> list[Rollout]:
        """Return what the first rank of the group took, on each of its ranks."""
        if self._group is None:
            return taken
        if not self.is_first:
            packed = self._hand_over([], self._group)
            return [parse_rollout(data).rollout for data in packed]
        messages = [RolloutMessage(step=0, place=0, rollout=rollout) for rollout in taken]
        self._hand_over([pack_rollout(message) for message in messages], self._group)
        return taken

    def _hand_over(self, packed: list[bytes], group: dist.ProcessGroup) -> list[bytes]:
        """Return what the first rank of the group brings, on each of its ranks."""
        handed = [packed]
        dist.broadcast_object_list(handed, group=group, group_src=0, device=self._device)
        return handed[0]
