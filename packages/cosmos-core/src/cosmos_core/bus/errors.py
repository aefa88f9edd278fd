"""What can go wrong between a process and the bus."""

from cosmos_core.errors import CosmosError


class BusError(CosmosError):
    """Parent of every error of the bus."""


class BusUnreachableError(BusError, ConnectionError):
    """Raised when Redis does not answer within the patience of a call, or refuses the password."""


class BusRefusedError(BusError):
    """Raised when Redis answers, but does not do what it is asked: no memory, no disk, read-only.

    What may pass is tried again within the patience of a call.
    """


class ServerStartError(BusError, RuntimeError):
    """Raised by `RedisServer.start` when the bundled server does not come up, with its log."""


class LeaseHeldError(BusError):
    """Raised to a controller while another one holds the lease of the run."""


class FencedError(BusError):
    """Raised to a controller whose place another one has taken: it must stop at once."""


class RunLostError(BusError):
    """Raised to a controller when Redis has lost what was committed: nobody can go on from that."""


class SupersededError(BusError):
    """Raised to a replica when a newer process has joined under its name: it must stop."""


class CodeVersionError(BusError):
    """Raised to a replica whose code is not that of the controller: the same would happen again."""


class PayloadMissingError(BusError, KeyError):
    """Raised by `Bus.get_payloads` for keys that were never stored or are already deleted."""

    def __str__(self) -> str:
        """Return the message as it is; KeyError would quote it."""
        return str(self.args[0])
