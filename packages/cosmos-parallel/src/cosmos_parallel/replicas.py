"""Sums over policy replicas, on a connection of their own.

Each replica is a group of ranks with its own default process group. Rank r of every replica meets
rank r of the others in a private group, which lives for one membership epoch: when a member is
lost the group is closed, and the survivors make another with the next epoch.

A step is taken by all members or by none. Each rank says in the store that it has all sums; who
sees that all have writes "commit", who waits too long or has lost a sum writes "void", and what
was written first holds for everybody:

    sums ok ──► ready/A ─┐  all ready ──► compare_set(decision, commit) ─┐
    sums ok ──► ready/B ─┤                                               ├──► decision
    lost    ──► ready/- ─┘  deadline  ──► compare_set(decision, void)   ─┘
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from cosmos_parallel.errors import ReplicaLostError
from cosmos_parallel.nccl_groups import abort, finish, make_nccl_group, meet
from cosmos_parallel.titan import DeviceType


class ReplicaGroup(Protocol):
    """What the learner needs of the other policy replicas."""

    @property
    def is_waiting(self) -> bool:
        """Whether this replica, with all of its ranks, waits for others; asked from any thread."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the replicas, in place; all replicas call in the same order.

        Every replica ends with bitwise the same values.

        Raises:
            ReplicaLostError: if a replica did not take part before the deadline.
        """
        ...

    def commit(self) -> None:
        """Return once every member has all sums of this step: now all of them take it.

        Raises:
            ReplicaLostError: if the step is void, for all members; nothing may be updated.
        """
        ...

    def exchange(self, what: str, words: str) -> Mapping[str, str]:
        """Return what rank 0 of each member has to say of the step just committed, by its name.

        Only rank 0 of each replica calls, once for each ``what``; nothing depends on the answer:
        who does not speak before the deadline is left out.
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
        num_ranks: ranks in each replica.
    """

    names: tuple[str, ...]
    index: int
    epoch: int = 0
    rank: int = 0
    num_ranks: int = 1


class StoreReplicaGroup:
    """Replicas that meet through a store; gloo on CPU, NCCL on CUDA.

    Attributes:
        is_waiting: whether this replica, with all of its ranks, waits for others in a sum, as for
            one that hangs; asked from any thread.
    """

    def __init__(
        self,
        store: Store,
        members: ReplicaMembership,
        *,
        timeout_s: float = 120.0,
        commit_timeout_s: float = 30.0,
        device_type: DeviceType = "cpu",
        is_alive: Callable[[str], bool] | None = None,
    ) -> None:
        """Meet the other members; returns when all are connected.

        Args:
            store: reachable by all members; not owned.
            members: who takes part.
            timeout_s: how long to wait for the others, here and in each sum.
            commit_timeout_s: how long to wait for the others to have all sums, once this one has.
            device_type: where the summed tensors are.
            is_alive: whether a member has shown a sign of life since this was asked last; the
                silent are given up after two ``commit_timeout_s`` instead of ``timeout_s``.

        Raises:
            ReplicaLostError: if some member did not come in time.
        """
        self.is_waiting = False
        self._members = members
        self._timeout_s = timeout_s
        self._commit_timeout = timedelta(seconds=commit_timeout_s)
        self._num_sums = self._num_commits = self._num_gathered = 0
        self._said: list[str] = []
        self._is_alive = is_alive
        self._device_type: DeviceType = device_type
        self._decisions = PrefixStore(f"replicas/{members.epoch}/decisions", store)
        self._store = PrefixStore(f"replicas/{members.epoch}/{members.rank}", store)
        # Any: torch's stubs give its backends no collectives
        self._group: Any = None
        self._arrive()
        if is_alive is not None:
            self._await_arrivals(is_alive)
        try:
            self._group = self._connect()
        except (RuntimeError, ValueError) as error:
            raise self._lost("could not connect", error) from error

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the replicas, in place; see ``ReplicaGroup``."""
        if self._group is None:
            raise ReplicaLostError(f"the group of epoch {self._members.epoch} is closed")
        self._num_sums += 1
        if self._is_alive is not None and self._num_gathered == self._num_commits:
            self._gather(self._is_alive)
        try:
            self.is_waiting = True
            self._arrive()
            for tensor in tensors:
                self._finish(self._group.allreduce([tensor]))
        except (RuntimeError, ValueError) as error:
            self.close()
            lost = self._lost("the sum broke", error)
            self._decide("void")
            raise lost from error
        finally:
            self.is_waiting = False

    def commit(self) -> None:
        """Return once every member has all sums of this step; see ``ReplicaGroup``."""
        if self._group is None:
            raise ReplicaLostError(f"the group of epoch {self._members.epoch} is closed")
        members, step = self._members, self._num_commits
        ready = self._keys(f"{step}/ready")
        late: tuple[str, ...] = ()
        try:
            self._decisions.set(f"{step}/ready/{members.index}.{members.rank}", "")
            self._decisions.wait(list(ready), self._commit_timeout)
        except (RuntimeError, ValueError):
            late = self._late(ready)
        decision = self._decide("void" if late else "commit")
        self._num_commits += 1
        if decision != "commit":
            self.close()
            raise ReplicaLostError(
                f"epoch {members.epoch}: a step of {', '.join(members.names)} is void; "
                f"{', '.join(late) or 'a member'} did not have all of its sums in time",
                late,
            )
        self._forget(step - 1)

    def exchange(self, what: str, words: str) -> Mapping[str, str]:
        """Return what each member has to say of the step just committed; see ``ReplicaGroup``."""
        members, prefix = self._members, f"{self._num_commits}/said/{what}"
        keys = {f"{prefix}/{index}": name for index, name in enumerate(members.names)}
        self._said.append(f"{prefix}/{members.index}")
        with contextlib.suppress(RuntimeError, ValueError):  # the next step says it
            self._decisions.set(self._said[-1], words)
            self._await_words(keys)
            return {
                name: self._decisions.get(key).decode()
                for key, name in keys.items()
                if self._decisions.check([key])
            }
        return {members.names[members.index]: words}

    def send(self, tensors: Sequence[Tensor], index: int) -> None:
        """Send tensors to this rank of another member, which receives as many.

        Raises:
            ReplicaLostError: if it did not take them in time.
        """
        self._exchange(lambda tensor: self._group.send([tensor], index, 0), tensors, index)

    def receive(self, tensors: Sequence[Tensor], index: int) -> None:
        """Fill tensors with what this rank of another member sends.

        Raises:
            ReplicaLostError: if it did not send in time.
        """
        self._exchange(lambda tensor: self._group.recv([tensor], index, 0), tensors, index)

    def close(self) -> None:
        """Drop the connections; may be called twice."""
        group, self._group = self._group, None
        if group is not None and self._device_type == "cuda":
            abort(group)

    def _exchange(
        self, move: Callable[[Tensor], Any], tensors: Sequence[Tensor], index: int
    ) -> None:
        name = self._members.names[index]
        if self._group is None:
            raise ReplicaLostError(f"the group of epoch {self._members.epoch} is closed")
        try:
            if self._device_type == "cuda":
                meet(move, self._timeout_s)
            for tensor in tensors:
                self._finish(move(tensor))
        except (RuntimeError, ValueError) as error:
            self.close()
            self._decide("void")
            raise ReplicaLostError(
                f"epoch {self._members.epoch}: the exchange of state with {name} broke ({error})",
                (name,),
            ) from error

    def _await_arrivals(self, is_alive: Callable[[str], bool]) -> None:
        """Wait for all members to come, as long as they show signs of life.

        One may have died since it asked to take part, and connecting would wait for it.
        """
        members, late = self._members, tuple[str, ...]()
        awaited = [f"arrived/{index}" for index in range(len(members.names))]
        come = f"come/{members.rank}"
        for _ in range(self._num_waits):
            try:
                self._store.wait(awaited, self._commit_timeout)
                if self._decisions.compare_set(come, "", "all") == b"all":
                    return
                break  # others have given one up
            except (RuntimeError, ValueError):
                late = self._find_missing()
                if self._is_there(come) or not all(is_alive(name) for name in late):
                    break
        with contextlib.suppress(RuntimeError, ValueError):
            # ranks but the first do not know who is alive
            ranks = range(members.num_ranks) if members.rank == 0 else (members.rank,)
            found = [self._decisions.compare_set(f"come/{rank}", "", "lost") for rank in ranks]
            if found[0] == b"all":
                return
        raise ReplicaLostError(
            f"epoch {members.epoch}: {', '.join(late) or 'a member'} did not come in time to "
            f"connect with {', '.join(members.names)}",
            late,
        )

    def _gather(self, is_alive: Callable[[str], bool]) -> None:
        """Wait for all ranks to get to this step, as long as they show signs of life."""
        members, step = self._members, self._num_commits
        awaited = self._keys(f"{step}/here")
        own = [key for key, name in awaited.items() if name == members.names[members.index]]
        for _ in range(self._num_waits):
            try:
                self._decisions.set(f"{step}/here/{members.index}.{members.rank}", "")
                self.is_waiting = self._decisions.check(own)
                self._decisions.wait(list(awaited), self._commit_timeout)
            except (RuntimeError, ValueError):
                late = self._late(awaited)
                if not self._is_decided() and all(is_alive(name) for name in late):
                    continue
                break
            finally:
                self.is_waiting = False
            if self._is_decided():
                break  # void: the others have gone on without us
            self._num_gathered = step + 1
            return
        self.close()
        self._decide("void")
        late = self._late(awaited)
        raise ReplicaLostError(
            f"epoch {members.epoch}: {', '.join(late) or 'a member'} did not get in time to a step "
            f"of {', '.join(members.names)}",
            late,
        )

    def _await_words(self, keys: Mapping[str, str]) -> None:
        """Wait until all have spoken, or as long as who has not shows signs of life."""
        for _ in range(self._num_waits):
            with contextlib.suppress(RuntimeError, ValueError):
                self._decisions.wait(list(keys), self._commit_timeout)
                return
            is_alive = self._is_alive
            if is_alive is not None and not all(is_alive(name) for name in self._late(keys)):
                return

    @property
    def _num_waits(self) -> int:
        """How often ``commit_timeout_s`` is waited before ``timeout_s`` is over."""
        return max(1, math.ceil(self._timeout_s / self._commit_timeout.total_seconds()))

    def _forget(self, step: int) -> None:
        """Remove this rank's keys of a step that all have left behind: they would fill the store.

        Who is ready for a step has read the decision on the one before, and what was said of it.
        """
        index, rank, said = self._members.index, self._members.rank, self._said
        keys = [f"{step}/here/{index}.{rank}", f"{step}/ready/{index}.{rank}", *said]
        self._said = []
        if (index, rank) == (0, 0):
            keys.append(f"{step}/decision")
        with contextlib.suppress(RuntimeError, ValueError):  # the next step will say it
            for key in keys:
                self._decisions.delete_key(key)

    def _keys(self, prefix: str) -> dict[str, str]:
        """Return a key for each rank of each member, with the member's name."""
        return {
            f"{prefix}/{index}.{rank}": name
            for index, name in enumerate(self._members.names)
            for rank in range(self._members.num_ranks)
        }

    def _decide(self, wish: str) -> str:
        """Write a decision on the step in hand unless there is one; return the one that holds."""
        try:
            return self._decisions.compare_set(f"{self._num_commits}/decision", "", wish).decode()
        except (RuntimeError, ValueError):
            return "void"

    def _is_decided(self) -> bool:
        return self._is_there(f"{self._num_commits}/decision")

    def _is_there(self, key: str) -> bool:
        try:
            return self._decisions.check([key])
        except (RuntimeError, ValueError):
            return True

    def _late(self, ready: Mapping[str, str]) -> tuple[str, ...]:
        try:
            late = {name for key, name in ready.items() if not self._decisions.check([key])}
        except (RuntimeError, ValueError):
            return ("the host of the store",)
        return tuple(sorted(late))

    def _connect(self) -> Any:
        index, size = self._members.index, len(self._members.names)
        timeout = timedelta(seconds=self._timeout_s)
        inner = PrefixStore("group", self._store)
        if self._device_type == "cpu":
            return dist.ProcessGroupGloo(inner, index, size, timeout)
        group = make_nccl_group(inner, index, size, self._timeout_s)
        meet(lambda number: group.allreduce([number]), self._timeout_s)
        return group

    def _finish(self, work: Any) -> None:
        if self._device_type == "cpu":
            work.wait()
        else:
            finish(self._group, work, self._timeout_s)

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
