"""PPO with a critic by policy trainers of which one dies between the two updates of a step.

python elastic_critic.py DIRECTORY RANKS; the last step and the state of each replica that ended
are written to DIRECTORY/NAME.pt, those of one that was always alone to DIRECTORY/fixed.pt. Ranks
share parameters, or are stages of a pipeline where the directory is called "stages".

policy-0   0 1 kills itself in the second update of step 2
policy-1   0 1 2 (void, again) 3 ... waits for policy-2 ... goes on with it
policy-2                           joins ...
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torchtitan.distributed  # noqa: F401  (imported once, before the forks)
from elastic_replicas import CONFIG as SHORT
from elastic_replicas import Fleet, full, wait_for
from torchft import coordination  # noqa: F401  (imported once, before the forks)

from cosmos_algos import CriticConfig, KlConfig, ObjectiveConfig, PpoConfig
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import ModelConfig, Recipe
from cosmos_app.roles.elastic import Gathering
from cosmos_app.roles.run_checkpoints import RunCheckpoints
from cosmos_app.roles.step_trainer import Seat
from cosmos_app.roles.trainer import Trainer
from cosmos_app.trainer_config import TrainerConfig
from cosmos_core.messages import SampleRef, Train
from cosmos_core.trajectory import Trajectory, VersionSpan
from cosmos_parallel import (
    ElasticReplicas,
    EmaConfig,
    LearnerConfig,
    Meeting,
    ParallelConfig,
    ProcessContext,
    ReplicaLostError,
    SgdConfig,
    build_mesh,
    open_meeting_store,
)
from cosmos_parallel.learner_state import state_of

CONFIG = replace(SHORT, lease_s=8.0)  # its first steps import much
DIES_AT, ALONE_UNTIL, STEPS_TOGETHER, MOST_STEPS = 2, 4, 3, 1000
PASSES_BEFORE = 3  # of step 2, with one micro-batch: by the reference, valued, trained on once
FILLING = 1  # the pipeline of two stages, which takes two passes at least
TINY = TinyModelConfig(hidden_size=32, num_layers=2, num_heads=2, tie_embeddings=False)
RECIPE = Recipe(
    algorithm=PpoConfig(
        critic=CriticConfig(coefficient=0.7),
        objective=ObjectiveConfig(
            kl=KlConfig(coefficient=0.05, place="reward", estimator="k1", reset_every=3)
        ),
        epochs=2,
    ),
    learner=LearnerConfig(optimizer=SgdConfig(lr=0.05, momentum=0.9), ema=EmaConfig(decay=0.9)),
    model=ModelConfig(tiny=TINY),
    trainer=TrainerConfig(layout="packed"),
)
LENGTHS = (3, 1, 4, 2, 6, 2, 3, 5)


def sample(step: int, index: int) -> Trajectory:
    """A prompt of two tokens and a response of chance."""
    chance, length = np.random.default_rng([step, index]), 2 + LENGTHS[index]
    return Trajectory(
        prompt_id="p",
        group="g",
        sibling=index,
        attempt=0,
        token_ids=chance.integers(3, 12, length).astype(np.int32),
        logprobs=np.array([0.0] * 2 + [-2.0] * LENGTHS[index], np.float32),
        trainable=np.arange(length) >= 2,
        versions=(VersionSpan(-1, 2), VersionSpan(step, length - 2)),
        rewards={},
        reward=float(chance.normal()),
        finish_reason="stop",
    )


def command(step: int) -> Train:
    samples = [sample(step, index) for index in range(len(LENGTHS))]
    refs = tuple(
        SampleRef(
            sibling=one.sibling,
            status="completed",
            key=str(one.sibling),
            num_tokens=one.num_tokens,
            reward=one.reward,
        )
        for one in samples
    )
    return Train(step=step, groups=(refs,), publish=False)


def attempt(trainer: Trainer, step: int) -> dict[str, float] | None:
    """Take a step; ``None`` if it was void."""
    ordered = command(step)
    share = trainer.share(ordered)
    trajectories = [sample(step, int(ref.key)) for ref in share.refs]
    try:
        return trainer.train(ordered, share, trajectories)
    except ReplicaLostError as error:
        trainer.lose(error)
        return None


def write(directory: Path, name: str, rank: int, trainer: Trainer, void: list[int]) -> None:
    learner = trainer._learner
    state = {
        key: full(value)
        for key, value in state_of(learner, learner.mesh.process).items()
        if not key.startswith("rng.")
    }
    parts = [state]
    if learner.mesh.is_distributed:  # each stage has its own
        parts *= learner.mesh.process.world_size
        dist.all_gather_object(parts, state)
    whole = {key: value for part in parts for key, value in part.items()}
    if rank == 0:
        torch.save((trainer.version, void, whole), directory / f"{name}.pt")


def in_stages(directory: Path) -> bool:
    return directory.name == "stages"


def make_trainer(directory: Path, name: str, place: ProcessContext, address: str) -> Trainer:
    pp = place.world_size if in_stages(directory) else 1
    mesh = build_mesh(ParallelConfig(pp=pp), place)
    held = replace(
        RECIPE.model.training, implementation="native" if in_stages(directory) else "auto"
    )

    def meet_the_others() -> ElasticReplicas:
        meeting = Meeting(address, name, CONFIG) if place.rank == 0 else None
        return ElasticReplicas(meeting, open_meeting_store(address, CONFIG), mesh, CONFIG)

    return Trainer(
        replace(RECIPE, model=replace(RECIPE.model, training=held)),
        directory / "model",
        Seat(replica_index=0, num_replicas=1, mesh=mesh),
        RunCheckpoints(directory / f"checkpoints-{name}", mesh),
        Gathering(meet_the_others) if address else None,
    )


def replica(directory: Path, address: str, name: str, place: ProcessContext) -> None:
    """Take steps as the module says, until three were taken with the one that joined."""
    trainer = make_trainer(directory, name, place, address)
    (directory / f"{name}.loaded").touch()
    at_start = [0, 0]  # the step in hand, and passes before it
    before = PASSES_BEFORE + (FILLING if in_stages(directory) else 0)

    def die_in_the_second_update(*_: object) -> None:
        if at_start[0] == DIES_AT and trainer.num_passes - at_start[1] > before:
            os.kill(os.getpid(), signal.SIGKILL)

    if name == "policy-0":
        trainer._model.register_forward_hook(die_in_the_second_update)
    void: list[int] = []
    together = 0
    awaited = "wanted" if name == "policy-2" else f"policy-{int(name == 'policy-0')}.loaded"
    wait_for((directory / awaited).exists, awaited)
    for _ in range(MOST_STEPS):
        step = trainer.meet(trainer.version)
        if step == 0 and trainer._seat.num_replicas < 2:
            trainer._gathering.take()  # type: ignore[union-attr]  (the other one is not there yet)
            time.sleep(0.05)
            continue
        at_start[:] = step, trainer.num_passes
        metrics = attempt(trainer, step)
        if metrics is None:
            void.append(step)
            continue
        if step >= ALONE_UNTIL and metrics["replicas"] == 1.0:
            wait_for((directory / "policy-2.loaded").exists, "the start of policy-2")
            (directory / "wanted").touch()
            time.sleep(0.1)
        together += int(step >= ALONE_UNTIL and metrics["replicas"] == 2.0)
        if together == STEPS_TOGETHER:
            break
    write(directory, name, place.rank, trainer, void)
    trainer.close()


def elastic_run(directory: Path, size: int) -> None:
    """Start replicas, and end the other ranks of the one that dies."""
    with Fleet(replica, directory, size, CONFIG) as fleet:
        fleet.start("policy-0", "policy-1")
        fleet.end_after_a_death("policy-0")
        fleet.start("policy-2")
        fleet.join("policy-1", "policy-2", timeout_s=150)


def fixed_run(directory: Path) -> None:
    """Take the same steps in one process that nobody joins or leaves."""
    last, _, _ = torch.load(directory / "policy-1.pt")
    trainer = make_trainer(directory, "fixed", ProcessContext(), "")
    for step in range(last):
        attempt(trainer, step)
    write(directory, "fixed", 0, trainer, [])
    trainer.close()


if __name__ == "__main__":
    where, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    build_tiny_model(where / "model", ["0123456789+=?"], TINY, seed=0)
    elastic_run(where, num_ranks)
    assert not dist.is_initialized()
    torch.set_num_threads(1)
    fixed_run(where)
