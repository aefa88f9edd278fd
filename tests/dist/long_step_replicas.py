"""Two replicas come during a step that is longer than steps wait for others to join.

python long_step_replicas.py DIRECTORY; writes what each saw to DIRECTORY/NAME.json.

policy-0   0 1 2 (long) ............ 3 4 5 ...
policy-1          ask for a quorum,  3 4 5 ...
policy-2          more than half     3 4 5 ...
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torchtitan.distributed  # noqa: F401  (imported once, before the forks)
from elastic_replicas import CONFIG, Fleet, Replica, build_model, wait_for
from torchft import coordination  # noqa: F401  (imported once, before the forks)

from cosmos_parallel import ProcessContext

LONG_AT, LAST = 2, 5
JOIN_S = 2.0
LONG_S = 4 * JOIN_S


class Patient(Replica):
    """Takes a long step once it is told that the others have come."""

    config = replace(CONFIG, lease_s=1.5, join_s=JOIN_S)
    dies_at = LAST + 1

    def run(self) -> None:
        step = 0
        while step <= LAST:
            seat = self.replicas.meet(self.learner, step)
            step = seat.step
            if step > LAST:
                break
            report = self.learner.step(self.share(seat), self.loss(step))
            self.note(step=step, loss=report.loss, names=seat.names, healed_by=seat.healed_by)
            step += 1
        self.replicas.close()

    def loss(self, step: int):
        inner = super().loss(step)

        def slow(model, batch):
            if self.name == "policy-0" and step == LONG_AT and not self.ended("step", "begun"):
                (self.directory / "step.begun").touch()
                wait_for((self.directory / "others.there").exists, "the others")
                time.sleep(LONG_S)
            return inner(model, batch)

        return slow


class Newcomer(Patient):
    """Says that it is there, alive to the others, before it asks for a quorum."""

    def run(self) -> None:
        (self.directory / f"{self.name}.there").touch()
        super().run()


def act(directory: Path, address: str, name: str, place: ProcessContext) -> None:
    kind = Patient if name == "policy-0" else Newcomer
    kind(directory, address, name, place).run()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    build_model("qwen3", where, tied=True)
    with Fleet(act, where, 1, Patient.config) as fleet:
        fleet.start("policy-0")
        wait_for((where / "step.begun").exists, "the long step")
        fleet.start("policy-1", "policy-2")
        for one in ("policy-1", "policy-2"):
            wait_for((where / f"{one}.there").exists, one)
        (where / "others.there").touch()
        fleet.join("policy-0", "policy-1", "policy-2", timeout_s=60)
