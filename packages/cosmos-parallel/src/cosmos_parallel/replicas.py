"""Sums over policy replicas, on a connection of their own.

Each replica is a group of ranks with its own default process group. Rank r of every replica meets
rank r of the others in a private group, which lives for one membership epoch: when a member is
lost the group is closed, and the survivors make another with the next epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from cosmos_parallel.errors import ReplicaLostError
from cosmos_parallel.titan import DeviceType


class ReplicaGroup(Protocol):
    """What the learner needs of the other policy replicas."""

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the replicas, in place; all replicas call in the same order.

        Every replica ends with bitwise the same values.

        Raises:
            ReplicaLostError: if a replica did not take part before the deadline.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaMembership:
    """Who takes part in one epoch.

    Attributes:
        names: the replicas, in the same order everywhere.
        index: this replica's position in ``names``.
        epoch: number of the membership; a new one never meets the messages of an old one.
        rank: this process's rank inside its replica; it meets the same rank of the others.
    """

    names: tuple[str, ...]
    index: int
    epoch: int = 0
    rank: int = 0


class StoreReplicaGroup:
    """Replicas that meet through a store; gloo on CPU, NCCL on CUDA."""

    def __init__(
        self,
        store: Store,
        members: ReplicaMembership,
        *,
        timeout_s: float = 120.0,
        device_type: DeviceType = "cpu",
    ) -> None:
        """Meet the other members; returns when all are connected.

        Args:
            store: reachable by all members; not owned.
            members: who takes part.
            timeout_s: how long to wait for the others, here and in each sum.
            device_type: where the summed tensors are.

        Raises:
            ReplicaLostError: if some member did not come in time.
        """
        self._members = members
        self._timeout_s = timeout_s
        self._num_sums = 0
        self._store = PrefixStore(f"replicas/{members.epoch}/{members.rank}", store)
        # Any: torch's stubs give its backends no collectives
        self._group: Any = None
        self._arrive()
        try:
            self._group = self._connect(device_type)
        except (RuntimeError, ValueError) as error:
            raise self._lost("could not connect", error) from error

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the replicas, in place; see ``ReplicaGroup``."""
        if self._group is None:
            raise ReplicaLostError(f"the group of epoch {self._members.epoch} is closed")
        self._num_sums += 1
        try:
            self._arrive()
            for tensor in tensors:
                self._group.allreduce([tensor]).wait()
        except (RuntimeError, ValueError) as error:
            self._group = None
            raise self._lost("the sum broke", error) from error

    def close(self) -> None:
        """Drop the connections; may be called twice."""
        self._group = None

    def _connect(self, device_type: DeviceType) -> Any:
        index, size = self._members.index, len(self._members.names)
        timeout = timedelta(seconds=self._timeout_s)
        inner = PrefixStore("group", self._store)
        if device_type == "cpu":
            return dist.ProcessGroupGloo(inner, index, size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(inner, index, size, options)

    def _arrive(self) -> None:
        self._store.set(f"arrived/{self._members.index}", str(self._num_sums))

    def _lost(self, what: str, error: Exception) -> ReplicaLostError:
        missing = self._find_missing()
        who = (
            f"waited {self._timeout_s:g} s for {', '.join(missing)}"
            if missing
            else "all members had arrived, then a connection closed"
        )
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        return ReplicaLostError(
            f"epoch {self._members.epoch}, sum {self._num_sums} over replicas "
            f"{', '.join(self._members.names)}: {what}; {who} ({cause})",
            missing,
        )

    def _find_missing(self) -> tuple[str, ...]:
        missing: list[str] = []
        for index, name in enumerate(self._members.names):
            key = f"arrived/{index}"
            try:
                there = self._store.check([key]) and int(self._store.get(key)) >= self._num_sums
            except (RuntimeError, ValueError):
                return ("the host of the store",)
            if not there:
                missing.append(name)
        return tuple(missing)
