"""A rollout replica: fetches weights, draws its share of each step, sends it, to the end."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection
from pathlib import Path

import click
import torch

from cosmos_app.errors import DataError
from cosmos_app.wfm.disaggregated.meeting import Place, read_places
from cosmos_app.wfm.rewarding import reward_client
from cosmos_core.config import config_from_json
from cosmos_weightsync import ReceiverConfig, WeightReceiver, WeightSyncError, shards_of
from cosmos_wfm import DiffusionRlConfig, RolloutReplica, local_scorer, pack_rollout

_FOLLOW_S = 10.0


def serve_rollouts(output: Path, index: int, *, deadline_s: float) -> int:
    """Draw samples for the run that writes to ``output`` until it ends; return 0.

    Args:
        output: directory of the run; ``recipe.json`` there is what it does.
        index: which of the run's replicas this is, from 0.
        deadline_s: for the run to say where it is, and to publish a version.

    Raises:
        DataError: if there is no such run, or it wants fewer replicas.
        WeightSyncError: if the weights cannot be had although the run goes on.
    """
    torch.set_num_threads(1)
    places = read_places(output, deadline_s)
    if index >= places[0].replicas:
        raise DataError(f"this run has {places[0].replicas} rollout replicas; there is no {index}")
    recipe = config_from_json(DiffusionRlConfig, (output / "recipe.json").read_text("utf-8"))
    with ExitStack() as stack:
        scorer = stack.enter_context(reward_client(recipe)) or local_scorer(recipe.rewards)
        replica = RolloutReplica(recipe, scorer, num_ranks=len(places))
        links = [stack.enter_context(_connect(place)) for place in places]
        receiver = WeightReceiver(
            [place.weights for place in places],
            wanted=shards_of(replica.weights.items()),
            config=ReceiverConfig(token=places[0].token),
        )
        stack.callback(receiver.close)
        assert recipe.disaggregated is not None
        for step in range(places[0].first_step, recipe.num_steps):
            least = max(places[0].first_step, step - recipe.disaggregated.max_lag)
            try:
                receiver.stage(least, timeout_s=deadline_s)
                receiver.commit()
                _draw(replica, links, step, (index, places[0].replicas))
            except (WeightSyncError, OSError):
                if not _has_ended(links):
                    raise
                break
            click.echo(f"rollout replica {index}: step {step} drawn")
        else:
            for link in links:
                link.send_bytes(b"")
    return 0


def _draw(
    replica: RolloutReplica, links: Sequence[Connection], step: int, share: tuple[int, int]
) -> None:
    """Draw and send every ``share[1]``-th micro-batch of a step, over all ranks."""
    index, replicas = share
    turns = [
        (rank, place) for rank in range(len(links)) for place in range(replica.num_places(rank))
    ]
    drawn = [(rank, replica.draw(step, rank, place)) for rank, place in turns[index::replicas]]
    for rank, message in drawn:  # rewards of the first are computed while the last are drawn
        links[rank].send_bytes(pack_rollout(message))


def _connect(place: Place) -> Connection:
    return Client((place.host, place.port), authkey=place.token.encode())


def _has_ended(links: Sequence[Connection]) -> bool:
    """Return whether the run has hung up, which it does only when it is over."""
    end = time.monotonic() + _FOLLOW_S
    for link in links:
        try:
            if link.poll(max(0.0, end - time.monotonic())):
                link.recv_bytes()
        except (EOFError, OSError):
            return True
    return False
