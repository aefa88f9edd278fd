"""A receiver in a process of its own: commands and answers are JSON lines."""

import json
import resource
import sys
from typing import Any

import torch

from cosmos_weightsync import ReceiverConfig, WeightReceiver

torch.set_num_threads(1)


class Receiver:
    def __init__(self, setup: dict[str, Any]) -> None:
        self.receiver = WeightReceiver(
            setup["endpoints"], config=ReceiverConfig(**setup.get("config", {}))
        )

    def stage(self, version: int, timeout_s: float) -> dict[str, Any]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        staged = self.receiver.stage(version, timeout_s=timeout_s)
        return {
            "version": staged.version,
            "num_bytes": staged.num_bytes,
            "grown_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        }

    def forever(self) -> dict[str, Any]:
        while True:
            self.receiver.stage(0, timeout_s=30)


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    receiver = Receiver(json.loads(sys.argv[1]))
    reply({})
    for line in sys.stdin:
        command = json.loads(line)
        reply(getattr(receiver, command.pop("do"))(**command))


main()
