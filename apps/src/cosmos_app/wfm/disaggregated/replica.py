"""A rollout replica: asks for orders, fetches weights, draws, and brings samples with rewards."""

import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path

import click
import torch

from cosmos_app.progress_watch import ProgressWatch
from cosmos_app.wfm.disaggregated.meeting import Place, read_places
from cosmos_app.wfm.disaggregated.pulse import Pulse
from cosmos_app.wfm.joining import join_mesh
from cosmos_app.wfm.rewarding import reward_client
from cosmos_core.config import config_from_json
from cosmos_parallel import ParallelConfig, shutdown_distributed
from cosmos_weightsync import ReceiverConfig, WeightReceiver, WeightSyncError, shards_of
from cosmos_wfm import (
    DiffusionRlConfig,
    DisaggregatedConfig,
    RolloutMessage,
    RolloutReplica,
    local_scorer,
    pack_rollout,
    parse_order,
)

_FOLLOW_S = 10.0
_CONNECT_S = 60.0


def serve_rollouts(output: Path, *, deadline_s: float, child: str = "") -> int:
    """Draw samples for the run that writes to ``output`` until it ends; return 0.

    Args:
        output: directory of the run; ``recipe.json`` there is what it does.
        deadline_s: for the run to say where it is, and to publish a version.
        child: the name that the run gave it, if the run has started it.

    Raises:
        DataError: if there is no such run.
        WeightSyncError: if the weights cannot be had although the run goes on.
    """
    torch.set_num_threads(1)
    places = read_places(output, deadline_s)
    recipe = config_from_json(DiffusionRlConfig, (output / "recipe.json").read_text("utf-8"))
    config = recipe.disaggregated or DisaggregatedConfig()  # without one, the replica refuses
    with ExitStack() as stack:
        progress = stack.enter_context(ProgressWatch("rollout replica", config.stall_s))
        progress.at("loading the model")
        scorer = stack.enter_context(reward_client(recipe)) or local_scorer(recipe.rewards)
        stack.callback(shutdown_distributed)
        mesh = join_mesh(ParallelConfig(), recipe.compute)
        replica = RolloutReplica(recipe, scorer, mesh=mesh, on_part=progress.at)
        progress.at("connecting to the run")
        links = [stack.enter_context(connect(place)) for place in places]
        pulse = stack.enter_context(Pulse(links, config.lease_s, child=child))
        receiver = WeightReceiver(
            [place.weights for place in places],
            wanted=shards_of(replica.weights.items()),
            config=ReceiverConfig(token=places[0].token),
        )
        stack.callback(receiver.close)
        try:
            _Drawing(replica, receiver, links, (pulse, progress), deadline_s=deadline_s).go_on()
        except EOFError:
            pass
        except (WeightSyncError, OSError):
            if not _has_ended(links):
                raise
    return 0


class _Drawing:
    """What a replica does between its first order and the end of the run."""

    def __init__(
        self,
        replica: RolloutReplica,
        receiver: WeightReceiver,
        links: Sequence[Connection],
        signs: tuple[Pulse, ProgressWatch],
        *,
        deadline_s: float,
    ) -> None:
        self._replica = replica
        self._receiver = receiver
        self._links = links
        self._pulse, self._progress = signs
        self._deadline_s = deadline_s
        self._drawn: list[tuple[Connection, RolloutMessage]] = []
        self._scored, self._bell = Pipe(duplex=False)

    def go_on(self) -> None:
        """Draw what is ordered, one for each rank in turn, and bring what has its rewards.

        Raises:
            EOFError: when the run has hung up, which it does only when it is over.
        """
        for link in self._links:
            self._pulse.send(link, b"")
        while True:
            self._progress.rest()
            ready = wait([self._scored, *self._links])
            if self._scored in ready:  # what is done goes first: nobody is to draw it again
                self._scored.recv_bytes()
                self._bring()
            for link in self._links:
                if link in ready:
                    self._draw(link)

    def _draw(self, link: Connection) -> None:
        """Draw what a rank orders; it may order more before the rewards are there."""
        order = parse_order(link.recv_bytes())
        self._receiver.stage(order.version, timeout_s=self._deadline_s)
        self._progress.at("taking over the weights")
        self._receiver.commit()
        message = self._replica.draw(order)
        self._progress.rest()
        click.echo(f"rollout replica: step {order.step} micro-batch {order.place} drawn")
        self._drawn.append((link, message))
        message.rollout.rewards.add_done_callback(lambda _: self._bell.send_bytes(b"scored"))
        self._pulse.send(link, b"")

    def _bring(self) -> None:
        scored = [pair for pair in self._drawn if pair[1].rollout.rewards.done()]
        self._drawn = [pair for pair in self._drawn if pair not in scored]
        for link, message in scored:
            self._pulse.send(link, pack_rollout(message))


def connect(place: Place) -> Connection:
    """Connect to a rank, as multiprocessing's ``Client`` does, which knows no addresses of IPv6.

    Raises:
        AuthenticationError: if the token is another one.
        OSError: if nobody listens there.
    """
    with socket.create_connection((place.host, place.port), timeout=_CONNECT_S) as connected:
        connected.settimeout(None)  # as Connection wants it
        connection = Connection(connected.detach())
    token = place.token.encode()
    answer_challenge(connection, token)
    deliver_challenge(connection, token)
    return connection


def _has_ended(links: Sequence[Connection]) -> bool:
    """Return whether the run has hung up, which it does only when it is over."""
    end = time.monotonic() + _FOLLOW_S
    for link in links:
        try:
            while link.poll(max(0.0, end - time.monotonic())):
                link.recv_bytes()
        except (EOFError, OSError):
            return True
    return False
