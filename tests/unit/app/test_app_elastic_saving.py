"""Replicas that come and go write a checkpoint once, whoever of them is to write it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore

from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import ModelConfig, Recipe
from cosmos_app.roles.elastic import Gathering
from cosmos_app.roles.run_checkpoints import RunCheckpoints
from cosmos_app.roles.step_trainer import Seat
from cosmos_app.roles.trainer import Trainer
from cosmos_core.control import Controller, ControllerConfig
from cosmos_parallel import (
    Attendance,
    Attendee,
    ElasticConfig,
    ElasticReplicas,
    ParallelConfig,
    build_mesh,
)

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=32)
MESH = build_mesh(ParallelConfig())


class Alive:
    """Everybody is; ``looked`` is set when somebody looks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.looked = threading.Event()

    def attend(self, me: Attendee) -> Attendance:
        raise NotImplementedError(me)

    def is_alive(self, name: str) -> bool:
        del name
        self.looked.set()
        return True

    def close(self) -> None:
        """Nobody is left."""


def test_who_saves_the_last_weights_waits_for_the_first_of_the_step_to_write_them(
    tmp_path: Path,
) -> None:
    """Steps end for all at once, and a checkpoint that was due may be written when all stop."""
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["1+1=2"], TINY, seed=0)
    recipe = replace(Recipe(), model=ModelConfig(tiny=TINY))
    writing = threading.Event()
    store, members = HashStore(), [Alive("policy-0"), Alive("policy-1")]
    controller = Controller(ControllerConfig(num_steps=1, groups_per_step=1, samples_per_group=2))
    controller.state.step = 1

    def written() -> tuple[int, ...]:
        """Write slowly: until the other has come, and would write as well."""
        writing.set()
        assert members[1].looked.wait(timeout=60)
        return ()

    def trainer(index: int) -> Trainer:
        others = ElasticReplicas(members[index], store, MESH, ElasticConfig())
        made = Trainer(
            recipe,
            tmp_path / "model",
            Seat(replica_index=index, num_replicas=2, mesh=MESH),
            RunCheckpoints(tmp_path / "checkpoints", MESH, written if index == 0 else tuple),
            Gathering(lambda: others),
        )
        made.version = 1
        return made

    members[1].looked.set()  # nothing is to be loaded
    first, second = trainer(0), trainer(1)
    members[1].looked.clear()
    writing.clear()
    try:
        with ThreadPoolExecutor(2) as pool:
            due = pool.submit(first.save, controller.cut())
            assert writing.wait(timeout=60)
            second.settle_end()
            assert second.is_first_replica
            at_end = pool.submit(second.save, controller.cut())
            assert due.result(timeout=60) == at_end.result(timeout=60) != ""
        first.settle_end()
        assert not first.is_first_replica
        export = tmp_path / "export" / "model"
        second.export(export)
        made = export.stat().st_ino
        first.export(export)
        assert export.stat().st_ino == made, "the other finds it done"
    finally:
        first.close()
        second.close()
