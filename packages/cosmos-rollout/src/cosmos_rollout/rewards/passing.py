"""Whether a reward that failed may do better another time, as one that asks a server may."""

import errno
import socket

from cosmos_rollout.errors import RewardError

_OF_THE_NETWORK = frozenset(
    {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EADDRNOTAVAIL}
)


def may_pass(error: BaseException) -> bool:
    """Tell whether an error is of somebody who is away or slow, or was caused by such an error.

    Clients of HTTP have classes of their own for that; what the operating system said is behind
    them.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        if _is_passing(behind):
            return True
        behind = behind.__cause__ or behind.__context__
    return False


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, RewardError):
        return error.passes
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    return isinstance(error, OSError) and error.errno in _OF_THE_NETWORK
