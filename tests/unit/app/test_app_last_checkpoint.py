"""What a policy replica saves and exports when it is told to stop, and what it says of it."""

import asyncio
from pathlib import Path
from typing import Any, cast

from cosmos_app.prepare import run_files
from cosmos_app.recipe import Recipe
from cosmos_app.roles.policy import PolicyProcess, _is_over
from cosmos_app.roles.process import RunContext, TorchrunPlace
from cosmos_app.roles.telling import Telling
from cosmos_core.control import ALL_DONE, Controller, ControllerConfig
from cosmos_core.lineage import is_on_line
from cosmos_core.messages import CheckpointSaved, Event, Stop
from cosmos_core.rundir import RunDirectory


class Told:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def send(self, event: Event) -> None:
        self.events.append(event)


class Weights:
    """A trainer that only saves and exports, and notes it."""

    def __init__(self, version: int, *, is_first_replica: bool) -> None:
        self.version, self.lineage = version, 0
        self.is_first_replica = is_first_replica
        self.did: list[str] = []

    def is_lost_on(self, line: tuple[int, ...]) -> bool:
        return not is_on_line(line, self.lineage, self.version)

    def settle_end(self) -> None:
        self.did.append("settled")

    def save(self, cut: bytes) -> str:
        assert cut
        self.did.append("saved")
        return "there" if self.is_first_replica else ""

    def export(self, directory: Path) -> None:
        self.did.append(f"exported to {directory.name}")


def stop_at(version: int) -> Stop:
    config = ControllerConfig(num_steps=9, groups_per_step=1, samples_per_group=2)
    controller = Controller(config)
    controller.state.step = version
    return Stop(reason=ALL_DONE, cut=controller.cut())


def stopped(tmp_path: Path, trainer: Any, stop: Stop) -> list[Event]:
    recipe, channel, bus = Recipe(), Told(), None
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        context = RunContext(
            run=run,
            recipe=recipe,
            files=run_files(recipe, run.path),
            redis_url="redis://nowhere",
            namespace="n",
        )
        place = TorchrunPlace(rank=0, local_rank=0, world_size=1)
        process = PolicyProcess(context, cast(Any, bus), "policy-0", place)
        tell = Telling("policy-0", cast(Any, channel))
        asyncio.run(process._stop(trainer, stop, tell))
    return channel.events


def test_the_first_replica_saves_and_exports(tmp_path):
    trainer = Weights(5, is_first_replica=True)
    saved = CheckpointSaved(replica="policy-0", step=4, path="there")
    assert stopped(tmp_path, trainer, stop_at(5)) == [saved]
    assert trainer.did == ["settled", "saved", "exported to model"]


def test_another_does_not_say_that_it_has_saved(tmp_path):
    trainer = Weights(5, is_first_replica=False)
    saved = CheckpointSaved(replica="policy-0", step=4, path="")
    assert stopped(tmp_path, trainer, stop_at(5)) == [saved]


def test_all_are_asked_to_export_and_one_that_came_after_the_end_too(tmp_path):
    """Who was to do it may have died; `Trainer.export` settles who of them does."""
    for name in ("first", "other"):
        trainer = Weights(5, is_first_replica=name == "first")
        stopped(tmp_path / name, trainer, stop_at(5))
        assert trainer.did[-1] == "exported to model"
    trainer = Weights(Recipe().trainer.steps, is_first_replica=True)
    assert stopped(tmp_path / "late", trainer, Stop(reason=ALL_DONE)) == []
    assert trainer.did == ["exported to model"]
    trainer = Weights(3, is_first_replica=True)
    stopped(tmp_path / "early", trainer, Stop(reason=ALL_DONE))
    assert trainer.did == []


def test_one_with_newer_weights_than_the_cut_saves_nothing_and_waits_for_another(tmp_path):
    """Beside the cut of version 4 the weights of version 5 would be trained twice on one step."""
    trainer = Weights(5, is_first_replica=True)
    assert stopped(tmp_path, trainer, stop_at(4)) == []
    assert trainer.did == []
    given = {4: False, 5: True, 6: True}
    assert {at: _is_over(cast(Any, trainer), stop_at(at)) for at in given} == given
    assert _is_over(cast(Any, trainer), Stop(reason=ALL_DONE))
    assert not _is_over(cast(Any, trainer), None)


def test_one_that_came_late_neither_saves_nor_exports_its_older_weights(tmp_path):
    trainer = Weights(4, is_first_replica=True)
    assert stopped(tmp_path, trainer, stop_at(5)) == []
    assert trainer.did == []
