"""What can go wrong between a process and the bus."""

from cosmos_core.errors import CosmosError


class BusError(CosmosError):
    """Parent of every error of the bus."""


class BusUnreachableError(BusError, ConnectionError):
    """Raised when Redis does not answer within the patience of a call, or refuses the password."""


class BusPasswordError(BusUnreachableError):
    """Raised when Redis refuses the password, or wants one and was given none."""


class BusRefusedError(BusError):
    """Raised when Redis answers, but does not do what it is asked: no memory, no disk, read-only.

    What may pass is tried again within the patience of a call.
    """


class ServerSettingsError(BusError):
    """Raised by `Bus.check_server` on a server that would lose a run, or fail it late.

    It evicts keys, is a replica, a cluster of several, or too old.
    """


class ServerStartError(BusError, RuntimeError):
    """Raised by `RedisServer.start` when the bundled server does not come up, with its log."""


class LeaseHeldError(BusError):
    """Raised to a controller while another one holds the lease of the run."""


class FencedError(BusError):
    """Raised to a controller whose place another one has taken: it must stop at once."""


class RunLostError(BusError):
    """Raised when Redis has lost what it was given of a run: nobody can go on from that."""

    def __init__(self, address: str, namespace: str) -> None:
        """Say so of a run on the server at an address."""
        super().__init__(
            f"Redis at {address} has lost the run {namespace!r}, as when it is restarted without "
            "appendonly, flushed, or evicts keys: the run cannot go on there; "
            "'cosmos-app run ... --resume' goes on from its newest checkpoint"
        )


class ControllerGoneError(BusError):
    """Raised to a replica whose run has had no controller for half a day: names the last one."""


class SupersededError(BusError):
    """Raised to a replica when a newer process has joined under its name: it must stop."""


class CodeVersionError(BusError):
    """Raised to who has other code than the controller, or the run's log: it would happen again.

    Also to who reports what is no event, as with a reward that is no number.
    """


class PayloadMissingError(BusError, KeyError):
    """Raised by `Bus.get_payloads` for keys that were never stored or are already deleted."""

    def __str__(self) -> str:
        """Return the message as it is; KeyError would quote it."""
        return str(self.args[0])
