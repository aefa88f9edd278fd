"""A run whose samples are drawn elsewhere: its replicas are started, kept and ended with it."""

import secrets
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from cosmos_app.roles.ranks import gather_texts
from cosmos_app.wfm.disaggregated.keeping import KeptReplicas, replica_specs
from cosmos_app.wfm.disaggregated.meeting import remove_place
from cosmos_app.wfm.disaggregated.modules import rollout_modules
from cosmos_app.wfm.disaggregated.trainer import ReplicaRollouts
from cosmos_parallel import TrainingMesh
from cosmos_wfm import ConnectRollouts, DiffusionRlConfig, StepParts

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
    num_started = config.replicas if config.start and rank == 0 else 0
    behind_ranks = mesh.process.world_size
    specs = replica_specs(output, num_started, config.restarts, first_device=behind_ranks)
    modules = rollout_modules(recipe) if num_started and config.preload else ()
    kept = KeptReplicas(specs, config.stall_s, modules=modules)
    with kept, ExitStack() as stack:

        def connect(weights: Mapping[str, Tensor], parts: StepParts) -> ReplicaRollouts:
            rollouts = ReplicaRollouts(weights, parts, recipe=recipe, mesh=mesh, token=token)
            stack.callback(rollouts.close)
            if num_started:
                rollouts.on_open, rollouts.on_heard = kept.open, kept.hear
                rollouts.on_hung = kept.kill
            kept.loss.add_done_callback(lambda loss: rollouts.give_up(loss.result()))
            return rollouts

        yield connect
