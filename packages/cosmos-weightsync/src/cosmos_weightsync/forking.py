"""Sockets that stay with the process that opened them, whatever it forks.

A child made by ``fork``, such as a data loader's worker, has a copy of every descriptor. As long as
it lives, the system keeps connections of a parent that was killed: whoever is at the other end
never learns that. So children close theirs, which says nothing to the other end.
"""

import os
import socket
import weakref
from functools import cache, partial

__all__ = ["closed_in_children"]


def closed_in_children(opened: socket.socket) -> socket.socket:
    """The socket, which every later child of this process closes before it does anything else."""
    _opened().add(opened)
    return opened


@cache
def _opened() -> "weakref.WeakSet[socket.socket]":
    """Those of this process. Python keeps what runs in children for good, so it is one for all."""
    opened: weakref.WeakSet[socket.socket] = weakref.WeakSet()
    os.register_at_fork(after_in_child=partial(_close, opened))
    return opened


def _close(opened: "weakref.WeakSet[socket.socket]") -> None:
    for each in list(opened):
        each.close()
