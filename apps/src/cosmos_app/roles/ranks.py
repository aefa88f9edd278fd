"""Small host messages between the ranks of one policy replica, as bytes, never pickled.

Every function but ``join_ranks`` and ``leave_ranks`` is called by all ranks of the default group,
in the same order.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cosmos_app.progress_watch import ProgressWatch
from cosmos_app.roles.process import TorchrunPlace
from cosmos_parallel import ProcessContext, init_distributed, shutdown_distributed

_COLLECTIVE_S = 24 * 3600.0  # ranks wait in a broadcast for their next command
_LONGEST_TEXT = 1024
_END_S = 120.0


def join_ranks(place: TorchrunPlace, *, casts: bool = False) -> ProcessContext:
    """Join the ranks that torchrun started.

    Args:
        place: of this process among them.
        casts: whether FSDP2 casts the weights that are computed with. Then a process by itself has
            a process group too, of one.
    """
    device = f"cuda:{place.local_rank}" if torch.cuda.is_available() else "cpu"
    if place.world_size > 1:
        return init_distributed(
            place.rank,
            place.world_size,
            init_method="env://",
            device=device,
            timeout_s=_COLLECTIVE_S,
        )
    if casts:
        return init_distributed(0, 1, store=HashStore(), device=device, timeout_s=_COLLECTIVE_S)
    if torch.cuda.is_available():
        torch.cuda.set_device(device)  # of random states and kernels that ask for no other
    return ProcessContext(device=torch.device(device))


def leave_ranks(
    replica: str, leave: Callable[[], None] = shutdown_distributed, *, end_s: float = _END_S
) -> None:
    """Leave the process groups of this rank; who hangs there ends its process.

    Args:
        replica: that it is a rank of.
        leave: leaves them.
        end_s: seconds that it may take.
    """
    with ProgressWatch(replica, end_s) as watch:
        watch.at("leaving its process groups")
        leave()


def gather_texts(text: str) -> list[str]:
    """Return the text of every rank, in rank order, on every rank.

    Raises:
        ValueError: if the text is longer than a kilobyte.
    """
    if not dist.is_initialized():
        return [text]
    data = text.encode()
    if len(data) > _LONGEST_TEXT:
        raise ValueError(f"a text of {len(data)} bytes; the longest is {_LONGEST_TEXT}")
    mine = torch.zeros(_LONGEST_TEXT, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [part.numpy().tobytes().rstrip(b"\0").decode() for part in parts]
