"""Where torchrun's ranks meet when all of them are on this machine: a store on loopback.

torchrun would open two, for its own words and for those of the ranks, which listen on all
interfaces and ask nobody for a secret.
"""

import uuid
from argparse import Namespace

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import parse_min_max_nnodes

from cosmos_parallel import open_store

_BACKEND = "loopback"
_HOST = "127.0.0.1"


def meet_on_loopback(arguments: Namespace) -> None:
    """Have ranks on one machine meet on loopback; who was told where to meet still does so there.

    Args:
        arguments: torchrun's, which are changed.
    """
    _, num_nodes = parse_min_max_nnodes(arguments.nnodes)
    told = (
        arguments.rdzv_backend != "static" or arguments.rdzv_endpoint or arguments.master_port
    ) and not arguments.standalone
    if told or num_nodes > 1:
        return
    rendezvous_handler_registry.register(_BACKEND, _LoopbackRendezvous)
    arguments.standalone = False
    arguments.rdzv_backend = _BACKEND
    arguments.rdzv_endpoint = _HOST
    arguments.rdzv_id = str(uuid.uuid4())


class _LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a node by itself: each round is complete, and has a store of its own."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        return _BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = open_store(_HOST, 0, hosting=True)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
