"""Other libraries' ways to move the same bytes, each as its users would call it.

Both read the trainer's live shards, without a snapshot, a digest or a version. Rows are read whole:
exact slices of the tensors that are cut by columns would be thousands of descriptors of a few KiB,
which both are slower at than at reading twice the bytes and cutting them at the receiver.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from weightsync_arms import Arm, Place, Steps, nothing
from weightsync_model import NUM_SENDERS, wanted_specs

from cosmos_weightsync import ShardSpec

ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor in a sender's memory."""

    address: int
    first: int
    count: int


@dataclass(slots=True)
class Reads:
    """What a receiver reads from one sender: from where, to where, how much."""

    remote: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, remote: int, local: int, size: int) -> None:
        self.remote.append(remote)
        self.local.append(local)
        self.sizes.append(size)


def local_rows(place: Place) -> dict[str, Rows]:
    """What this sender holds: FSDP cuts by rows."""
    assert place.model is not None
    found = {}
    for name, parameter in place.model.named_tensors():
        local = parameter.to_local()
        whole = -(-parameter.shape[0] // NUM_SENDERS)
        found[name] = Rows(local.data_ptr(), place.rank * whole, local.shape[0])
    return found


class Fetch:
    """A receiver's reads, and what is left to cut out of whole rows afterwards.

    Attributes:
        by_sender: The reads from each sender.
        scratch: Where whole rows of tensors cut by columns go.
    """

    def __init__(self, place: Place, senders: list[dict[str, Rows]]) -> None:
        specs = wanted_specs(place.size, place.receiver_rank)
        self._targets = place.targets
        self.scratch = torch.empty(
            sum(torch.Size(s.global_shape).numel() for s in specs if is_cut_by_columns(s)),
            dtype=torch.bfloat16,
        )
        self._cuts: list[tuple[Tensor, Tensor]] = []
        self.by_sender = [Reads() for _ in senders]
        for spec, into in self._destinations(specs):
            width = into[0].nbytes if into.dim() > 1 else into.element_size()
            low = 0 if is_cut_by_columns(spec) else spec.box.start[0]
            for reads, held in zip(self.by_sender, senders, strict=True):
                rows = held[spec.name]
                first = max(rows.first, low)
                last = min(rows.first + rows.count, low + into.shape[0])
                if first < last:
                    reads.add(
                        rows.address + (first - rows.first) * width,
                        into.data_ptr() + (first - low) * width,
                        (last - first) * width,
                    )

    def _destinations(self, specs: list[ShardSpec]) -> Iterator[tuple[ShardSpec, Tensor]]:
        start = 0
        for spec in specs:
            target = self._targets[spec.name]
            if not is_cut_by_columns(spec):
                yield spec, target
                continue
            size = torch.Size(spec.global_shape).numel()
            whole = self.scratch[start : start + size].view(spec.global_shape)
            start += size
            self._cuts.append((target, whole[:, spec.box.start[1] : spec.box.stop[1]]))
            yield spec, whole

    def cut(self) -> None:
        for target, part in self._cuts:
            target.copy_(part)


def is_cut_by_columns(spec: ShardSpec) -> bool:
    return len(spec.global_shape) > 1 and spec.box.shape[1] != spec.global_shape[1]


def told(mine: Any) -> list[Any]:
    """What every sender says, in every process."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found[:NUM_SENDERS]


class Library(Protocol):
    """Another library in one process."""

    def register(self, tensor: Tensor) -> None: ...

    def contact(self) -> Any: ...

    def connect(self, contacts: list[Any], reads: list[Reads]) -> None: ...

    def read(self) -> None: ...


class PeerArm:
    """Receivers read what they want out of the senders' shards, then cut whole rows."""

    def __init__(self, name: str, place: Place, start: Callable[[Place], Library]) -> None:
        self.name = name
        self._place = place
        self._start = start
        self._library: Library | None = None
        self._fetch: Fetch | None = None

    def prepare(self) -> None:
        """Start, register, connect; both have threads that spin, which no other arm is to feel."""
        place = self._place
        self._library = self._start(place)
        if place.model is not None:
            for _, parameter in place.model.named_tensors():
                self._library.register(parameter.to_local())
            told((local_rows(place), self._library.contact()))
            return
        senders = told(None)
        self._fetch = Fetch(place, [rows for rows, _ in senders])
        assert place.flat is not None
        self._library.register(place.flat)
        self._library.register(self._fetch.scratch)
        self._library.connect([contact for _, contact in senders], self._fetch.by_sender)

    def steps(self, turn: int) -> Steps:
        return {"pull": nothing if self._fetch is None else self._pull}

    def arrived(self) -> dict[str, Tensor] | None:
        return None if self._place.flat is None else self._place.targets

    def finish(self) -> None:
        self._library = self._fetch = None
        gc.collect()

    def _pull(self) -> None:
        assert self._fetch is not None
        assert self._library is not None
        self._library.read()
        self._fetch.cut()


class Nixl:
    """NIXL as its examples use it: a progress thread, one prepared READ for each sender."""

    def __init__(self, place: Place) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(f"benchmark-{place.rank}", nixl_agent_config())
        self._handles: list[Any] = []

    def register(self, tensor: Tensor) -> None:
        if tensor.nbytes:
            place = (tensor.data_ptr(), tensor.nbytes, 0, "")
            self._agent.register_memory([place], "DRAM")

    def contact(self) -> Any:
        return self._agent.get_agent_metadata()

    def connect(self, contacts: list[Any], reads: list[Reads]) -> None:
        for contact, mine in zip(contacts, reads, strict=True):
            peer = self._agent.add_remote_agent(contact)
            local = [(a, n, 0) for a, n in zip(mine.local, mine.sizes, strict=True)]
            remote = [(a, n, 0) for a, n in zip(mine.remote, mine.sizes, strict=True)]
            self._handles.append(
                self._agent.initialize_xfer(
                    "READ",
                    self._agent.get_xfer_descs(local, "DRAM"),
                    self._agent.get_xfer_descs(remote, "DRAM"),
                    peer,
                )
            )

    def read(self) -> None:
        waiting = list(self._handles)
        for handle in waiting:
            self._agent.transfer(handle)
        while waiting:
            states = [self._agent.check_xfer_state(handle) for handle in waiting]
            if "ERR" in states:
                raise RuntimeError("NIXL: a READ failed")
            waiting = [h for h, state in zip(waiting, states, strict=True) if state == "PROC"]
            time.sleep(50e-6)


class Mooncake:
    """Mooncake's transfer engine over TCP: one batch of reads for each sender, at the same time."""

    def __init__(self, place: Place) -> None:
        del place
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize(ADDRESS, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake does not start")
        self._contacts: list[str] = []
        self._reads: list[Reads] = []

    def register(self, tensor: Tensor) -> None:
        if tensor.nbytes and self._engine.register_memory(tensor.data_ptr(), tensor.nbytes) != 0:
            raise RuntimeError("Mooncake does not register memory")

    def contact(self) -> Any:
        return f"{ADDRESS}:{self._engine.get_rpc_port()}"

    def connect(self, contacts: list[Any], reads: list[Reads]) -> None:
        self._contacts, self._reads = contacts, reads

    def read(self) -> None:
        with ThreadPoolExecutor(NUM_SENDERS) as pool:
            done = list(pool.map(self._read_one, self._contacts, self._reads))
        if any(done):
            raise RuntimeError(f"Mooncake: reads ended with {done}")

    def _read_one(self, contact: str, reads: Reads) -> int:
        return self._engine.batch_transfer_sync_read(
            contact, reads.local, reads.remote, reads.sizes
        )


PEERS: dict[str, Callable[[Place], Library]] = {"NIXL alone": Nixl, "Mooncake TCP": Mooncake}
MODULES = {"NIXL alone": "nixl_cu12._api", "Mooncake TCP": "mooncake.engine"}


def peer_arms(place: Place, names: Sequence[str]) -> list[Arm]:
    """The arms of these peers."""
    return [PeerArm(name, place, PEERS[name]) for name in names]
