"""What the launcher and the process that forks for it say to each other, a JSON line each."""

import msgspec

FORKED = "cosmos_app"
"""The module whose command lines are forked."""

PRELOADER = "COSMOS_PRELOADER"
"""Environment variable that names the socket of one that has imported everything already."""

PRELOADER_OF_VLLM = "COSMOS_PRELOADER_VLLM"
"""Likewise, of one that has vLLM too, for replicas with it; without, the other forks them too."""

FORKED_AS = "COSMOS_FORKED_AS"
"""Environment variable with the id of a process that was forked; what it starts sees it too."""


class Order(msgspec.Struct, frozen=True):
    """A process to be forked.

    Attributes:
        number: of this order; its answers have it too.
        argv: command line, as if Python were started with it.
        environment: the whole of it.
        log: file that gets its standard output and error.
        directory: where it works.
    """

    number: int
    argv: list[str]
    environment: dict[str, str]
    log: str
    directory: str


class Began(msgspec.Struct, frozen=True, tag=True):
    """An order is carried out.

    Attributes:
        number: of the order.
        pid: the process.
    """

    number: int
    pid: int


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be forked; said once, before the end.

    Attributes:
        why: for people.
    """

    why: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process has ended.

    Attributes:
        number: of its order.
        code: exit code, or a signal's number below zero.
    """

    number: int
    code: int
