"""Groups over NCCL whose work ends, or is given up, and says which.

torch's own wait returns as soon as the stream is told to wait, so nobody hears of a member that
died. Its watchdog does, a minute later, and ends the process; but it leaves alone a group that is
aborted before it looks. A group that is made while ``TORCH_NCCL_BLOCKING_WAIT`` is set has none; an
app may see to that.

The first work of its kind makes a communicator, inside which NCCL waits for the others for ever; so
it is begun by `meet`.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

_LOOK_S = 0.0002
_WATCHDOG_S = 600.0  # beyond the deadline of whoever waits, who is the first to know


def make_nccl_group(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Return a group of which no work takes longer than ``timeout_s``; wait by `finish`."""
    # Any: torch's stubs give its backends no collectives
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s + _WATCHDOG_S)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def finish(group: Any, work: Any, timeout_s: float) -> None:
    """Return when the device is done with a piece of a group's work.

    Raises:
        RuntimeError: it broke, or was not done in time; the group is of no use any more.
    """
    end = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > end:
            abort(group)
            raise RuntimeError(f"not done after {timeout_s:g} s")
        time.sleep(_LOOK_S)
    work.wait()


def meet(begin: Callable[[Tensor], Any], timeout_s: float) -> None:
    """Have the other ranks of some work come, by doing it with a number that nobody wants.

    Args:
        begin: such work; all that take part in it call this.
        timeout_s: how long they may take.

    Raises:
        RuntimeError: they did not come; the group is of no use, and a thread waits on.
    """
    number = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.current_stream().synchronize()  # what begins in a thread does so on another stream
    met: Future[None] = Future()

    def move() -> None:
        try:
            with torch.cuda.device(number.device):  # a thread begins on the first one
                work = begin(number)
            while not work.is_completed():
                time.sleep(_LOOK_S)
            met.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits, in another thread
            met.set_exception(error)

    threading.Thread(target=move, name="nccl-meet", daemon=True).start()
    try:
        met.result(timeout_s)
    except TimeoutError as error:
        raise RuntimeError(f"not all came in {timeout_s:g} s") from error


def abort(group: Any) -> None:
    """End what is under way in a group; dropping it would wait for that."""
    with contextlib.suppress(RuntimeError):  # it is given up either way
        group.abort()
