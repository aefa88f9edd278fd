"""Forks senders and receivers that are killed by the hundred: importing torch once is enough.

Run by the tests of this folder as ``python zygote_process.py ADDRESS``. Every line of standard
input is the set-up of a process; it connects to ADDRESS and takes commands as JSON lines.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

import torch

from cosmos_weightsync import (
    ReceiverConfig,
    SenderConfig,
    WeightReceiver,
    WeightSender,
    WeightSyncError,
    shards_of,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.transports import TcpTransport

torch.set_num_threads(1)

SHAPES = {"embed": (300, 40), "wide": (60, 500), "norm": (33,), "scale": ()}


class Deadly:
    """TCP that ends the process, without a word, at the n-th message that it moves."""

    name = "tcp"
    capabilities = TcpTransport().capabilities

    def __init__(self) -> None:
        self.left = -1

    def prepare(self, side, host):
        return Pending(self, TcpTransport().prepare(side, host))

    def count(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


class Pending:
    def __init__(self, deadly, pending) -> None:
        self.deadly, self.pending = deadly, pending
        self.description, self.close = pending.description, pending.close

    def connect(self, peer, deadline):
        return Channel(self.deadly, self.pending.connect(peer, deadline))


class Channel:
    def __init__(self, deadly, channel) -> None:
        self.deadly, self.channel = deadly, channel
        self.device, self.capabilities = channel.device, channel.capabilities
        self.close = channel.close

    def send(self, view, deadline) -> None:
        self.deadly.count()
        self.channel.send(view, deadline)

    def recv_into(self, view, deadline) -> None:
        self.deadly.count()
        self.channel.recv_into(view, deadline)

    def send_rows(self, rows, deadline) -> None:
        self.deadly.count()
        self.channel.send_rows(rows, deadline)

    @property
    def compiled(self):
        return self.channel.compiled

    def send_moves(self, moves, deadline) -> None:
        self.deadly.count()
        self.channel.send_moves(moves, deadline)

    def recv_moves(self, moves, deadline):
        self.deadly.count()
        return self.channel.recv_moves(moves, deadline)

    def recv_hashed(self, into, checksum, deadline) -> None:
        self.deadly.count()
        self.channel.recv_hashed(into, checksum, deadline)


class Member:
    """A sender or receiver of a small model; sender ranks all hold the whole of it."""

    def __init__(
        self,
        directory: str,
        role: str,
        rank: int,
        *,
        num_ranks: int = 1,
        shapes: dict[str, list[int]] | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.deadly = Deadly()
        self.model = {name: torch.zeros(shape) for name, shape in (shapes or SHAPES).items()}
        shards = shards_of(self.model.items())
        options: dict[str, Any] = {"directory": directory, "bucket_bytes": 8192, **(config or {})}
        if role == "sender":
            self.sender = WeightSender(
                shards,
                rank=rank,
                num_ranks=num_ranks,
                config=SenderConfig(run_id="run", **options),
                transports=[self.deadly],
            )
            return
        patience = {"stall_s": 20.0, "linger_s": 0.2, "connect_timeout_s": 20.0}
        served = {"transport": "tcp", "serve_host": "127.0.0.1", "name": f"receiver {rank}"}
        self.receiver = WeightReceiver(
            wanted=shards,
            config=ReceiverConfig(**{**served, **patience, **options}),
            transports=[self.deadly],
        )

    def die_at(self, message: int) -> dict[str, Any]:
        self.deadly.left = message
        return {}

    def publish(self, version: int, rows: int = 0) -> dict[str, Any]:
        """Fill everything with the version's number, or so many rows of each tensor."""
        for tensor in self.model.values():
            (tensor[:rows] if rows else tensor).fill_(version)
        self.sender.publish(version)
        return {"version": version}

    def update(self, version: int, timeout_s: float) -> dict[str, Any]:
        error, wire_bytes, meanwhile = "", -1, self.state()
        try:
            wire_bytes = self.receiver.stage(version, timeout_s=timeout_s).wire_bytes
            meanwhile = self.state()
            self.receiver.commit()
            self.receiver.verify()
        except WeightSyncError as failed:
            error = f"{type(failed).__name__}: {failed}"
        told = {"error": error, "wire_bytes": wire_bytes, "meanwhile": meanwhile}
        return {**told, **self.state()}

    def planned(self) -> dict[str, Any]:
        """By name, whom this receiver was to take the version from that it staged last."""
        edges = self.receiver._fetcher._pieces
        return {edge.source.name: sum(s.num_bytes for s in edge.specs()) for edge in edges}

    def peers(self, count: int) -> dict[str, Any]:
        """Wait until the directory shows so many receivers with a version and a layout."""
        self.receiver._attendance.wait_for(
            lambda view: (
                count
                <= sum(
                    m.role == "receiver" and m.version >= 0 and bool(m.layout) for m in view.members
                )
            ),
            Deadline.after(60.0),
        )
        return {}

    def state(self) -> dict[str, Any]:
        values = {float(value) for t in self.model.values() for value in t.unique()}
        return {"version": self.receiver.version, "values": sorted(values)}


def live(setup: dict[str, Any], address: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    member = Member(**setup)
    lines = connection.makefile("rw")
    print(json.dumps({"pid": os.getpid()}), file=lines, flush=True)
    for line in lines:
        command = json.loads(line)
        answer = getattr(member, command.pop("do"))(**command)
        print(json.dumps(answer), file=lines, flush=True)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                live(json.loads(line), sys.argv[1])
            finally:
                os._exit(0)


main()
