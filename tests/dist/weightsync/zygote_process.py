"""Forks senders and receivers that are killed by the hundred: importing torch once is enough.

Run by `test_weightsync_kills` as ``python zygote_process.py ADDRESS``. Every line of standard input
is the set-up of a process; it connects to ADDRESS and takes commands as JSON lines.
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


class Member:
    def __init__(self, directory: str, role: str, rank: int, mode: str = "staged") -> None:
        self.deadly = Deadly()
        self.model = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        shards = shards_of(self.model.items())
        common: Any = {"directory": directory, "bucket_bytes": 8192}
        if role == "sender":
            self.sender = WeightSender(
                shards,
                rank=rank,
                num_ranks=2,
                config=SenderConfig(**common, run_id="run"),
                transports=[self.deadly],
            )
        else:
            self.receiver = WeightReceiver(
                wanted=shards,
                config=ReceiverConfig(
                    **common,
                    transport="tcp",
                    serve_host="127.0.0.1",
                    mode=mode,
                    prefer="receivers" if rank else "senders",
                    name=f"receiver {rank}",
                    stall_s=20.0,
                    linger_s=0.2,
                    connect_timeout_s=20.0,
                ),
                transports=[self.deadly],
            )

    def die_at(self, message: int) -> dict[str, Any]:
        self.deadly.left = message
        return {}

    def publish(self, version: int) -> dict[str, Any]:
        for tensor in self.model.values():
            tensor.fill_(version)
        self.sender.publish(version)
        return {"version": version}

    def update(self, version: int, timeout_s: float) -> dict[str, Any]:
        error = ""
        try:
            self.receiver.stage(version, timeout_s=timeout_s)
            self.receiver.commit()
            self.receiver.verify()
        except WeightSyncError as failed:
            error = f"{type(failed).__name__}: {failed}"
        return {"error": error, **self.state()}

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
