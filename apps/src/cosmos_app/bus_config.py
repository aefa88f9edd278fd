"""How a recipe says where the control plane is, and for how long it waits."""

import math
from dataclasses import dataclass

from cosmos_app.ranges import require_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class BusConfig:
    """The control plane.

    Attributes:
        url: a Redis or Valkey server, 6.2 or later, that evicts no keys and is no replica; the
            bundled one is started when there is none.
            A run's keys there go a week after its end, or its controller's last sign of life.
        port: of the bundled server; 0 for any free one.
        host: address, of IPv4 or IPv6, that the bundled server listens on beside loopback, for
            replicas on other machines; it always has a password.
        lease_s: a replica that shows no progress for this long is declared dead. A bundled server
            that says nothing for as long, but 10 s at least and 30 at most, is started again.
        first_lease_s: the same of a replica that has not done its first work, a load of weights, a
            group or a step, since it may have to compile; ``lease_s`` where that is longer. As long
            is a stop waited for whose step in hand lacks policies.
    """

    url: str | None = None
    port: int = 0
    host: str = "127.0.0.1"
    lease_s: float = 30.0
    first_lease_s: float = 300.0

    def __post_init__(self) -> None:
        require_at_least(self, {"port": 0, "lease_s": 0.1, "first_lease_s": 0.1})
        if self.port > 65535 or math.isinf(self.lease_s + self.first_lease_s):
            raise ValueError(
                f"port is {self.port}, lease_s {self.lease_s} and first_lease_s "
                f"{self.first_lease_s}; want a port, 0 for any free one, and numbers of seconds"
            )
