"""Names of everything a run keeps in Redis; one hash tag, so that a run lives in one cluster slot.

{namespace}:events                  stream, up: what replicas report
{namespace}:commands:REPLICA:INC    stream, down: one for each incarnation of a replica
{namespace}:log                     stream: batches of events the controller took in, in order
{namespace}:snapshot                its state before the first entry of the log
{namespace}:lease, token, sequence  who is the controller, and how often it committed
{namespace}:standbys                hash: who waits for the lease, and when it last said so
{namespace}:metrics                 stream: measurements on their way to the sinks
{namespace}:payloads                hash: encoded trajectories by their keys
{namespace}:status                  JSON for people
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one run."""

    namespace: str

    @property
    def events(self) -> str:
        """Stream of events."""
        return self._key("events")

    @property
    def log(self) -> str:
        """Stream of committed batches."""
        return self._key("log")

    @property
    def snapshot(self) -> str:
        """State before the log."""
        return self._key("snapshot")

    @property
    def lease(self) -> str:
        """Owner of the controller's lease; expires."""
        return self._key("lease")

    @property
    def token(self) -> str:
        """Newest fencing token."""
        return self._key("token")

    @property
    def sequence(self) -> str:
        """Number of commits."""
        return self._key("sequence")

    @property
    def standbys(self) -> str:
        """Hash of controllers that wait, and when they last said so."""
        return self._key("standbys")

    @property
    def metrics(self) -> str:
        """Stream of measurements."""
        return self._key("metrics")

    @property
    def status(self) -> str:
        """JSON for people."""
        return self._key("status")

    @property
    def payloads(self) -> str:
        """Hash of encoded trajectories: one key, so that they live as long as the run's state."""
        return self._key("payloads")

    def commands(self, replica: str, incarnation: str) -> str:
        """Stream of commands to one process."""
        return self._key(f"commands:{replica}:{incarnation}")

    def _key(self, name: str) -> str:
        return f"{{{self.namespace}}}:{name}"
