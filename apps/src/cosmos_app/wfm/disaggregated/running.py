"""A run whose samples are drawn elsewhere: its replicas are started, watched and ended with it."""

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from cosmos_app.roles.ranks import gather_texts
from cosmos_app.wfm.disaggregated.meeting import remove_place
from cosmos_app.wfm.disaggregated.trainer import ReplicaRollouts
from cosmos_parallel import TrainingMesh
from cosmos_wfm import ConnectRollouts, DiffusionRlConfig, StepParts

_END_S = 30.0
_TOKEN_BYTES = 24


@contextmanager
def remote_rollouts(
    recipe: DiffusionRlConfig, mesh: TrainingMesh
) -> Generator[ConnectRollouts | None]:
    """Give what connects to the replicas of a run, and end them with the block; every rank calls.

    ``None`` if the recipe has no table ``[disaggregated]``.
    """
    config = recipe.disaggregated
    if config is None:
        yield None
        return
    output, rank = Path(recipe.output), mesh.process.rank
    token = gather_texts(secrets.token_urlsafe(_TOKEN_BYTES))[0]
    remove_place(output, rank)  # of a run before
    mesh.barrier()
    connected: list[ReplicaRollouts] = []

    def connect(weights: Mapping[str, Tensor], parts: StepParts) -> ReplicaRollouts:
        connected.append(
            ReplicaRollouts(
                weights, parts, config=config, output=output, rank=mesh.data_rank, token=token
            )
        )
        for replica in replicas:
            threading.Thread(target=_watch, args=(replica, connected[0]), daemon=True).start()
        return connected[0]

    num_started = config.replicas if config.start and rank == 0 else 0
    replicas = [_start(output, index) for index in range(num_started)]
    try:
        yield connect
    finally:
        for rollouts in connected:
            rollouts.close()
        for replica in replicas:
            _end(replica)


def _start(output: Path, index: int) -> subprocess.Popen[bytes]:
    """Start a replica on this host; what it says goes to a file of its own."""
    command = [sys.executable, "-m", "cosmos_app", "wfm", "rollout", str(output)]
    directory = output / "disaggregated"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"replica{index}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--index", str(index)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
        )


def _watch(replica: subprocess.Popen[bytes], rollouts: ReplicaRollouts) -> None:
    if replica.wait() != 0:
        rollouts.lose()


def _end(replica: subprocess.Popen[bytes]) -> None:
    try:
        replica.wait(_END_S)
    except subprocess.TimeoutExpired:
        replica.kill()
        replica.wait()
