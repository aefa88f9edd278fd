"""How a receiver fetches, what it reuses, whom it serves and meets."""

import os
from dataclasses import dataclass, field

from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.frames import parse_endpoint
from cosmos_weightsync.gathering import Preference
from cosmos_weightsync.reuse import Reused, ReusePolicy
from cosmos_weightsync.server import check_address, check_exposure
from cosmos_weightsync.settings import check_choice, check_wait
from cosmos_weightsync.wanted import Mode

__all__ = ["ReceiverConfig", "usual_threads"]


def usual_threads() -> int:
    """How many senders are read from at the same time where nobody says: 4, on few processors 2.

    There the threads of both ends would only be in each other's way.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(2, min(4, count // 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverConfig:
    """How a receiver fetches, and whether it passes on what it has.

    Attributes:
        transport: ``shared_memory``, ``tcp``, ``process_group``, or the name of one handed to the
            receiver. ``auto`` takes for each sender what copies the bytes least often: see
            `cosmos_weightsync.transports.choose_transport`.
        bucket_bytes: Small pieces arrive in a bucket of this size; senders that are read from at
            the same time have equal parts of it. What this receiver serves has as much again.
        num_threads: How many senders are read from at the same time; half as many as there are
            processors, but 2 to 4, if nothing is said.
        token: What the senders want to be shown, and what this receiver wants to be shown.
        connect_timeout_s: How long meeting a sender may take.
        mode: ``staged`` receives beside the weights in use. ``in_place`` receives into them,
            without a second copy: from the beginning of `WeightReceiver.stage` until
            `WeightReceiver.commit` the receiver has no version.
        serve_host: The address at which other receivers can fetch from this one, by the endpoint
            `WeightReceiver.endpoint`. Empty serves nobody.
        stall_s: A holder that is silent for so long while it should send counts as lost.
        directory: The endpoint of a `WeightDirectory` that shows the senders, and receivers that
            have versions already; in the place of endpoints.
        group: Receivers of one group commit together, by `WeightReceiver.commit_together`.
        name: What the directory, and others in their errors, call this receiver.
        prefer: With a directory: whom to fetch from, ``senders`` or ``receivers``, where both will
            do. ``planned`` is for groups whose receivers serve and stage every version at the same
            time: a plan of the whole group by `host`, in which receivers pass on what they get.
        host: The name of the host for ``planned``; found out if empty.
        linger_s: Others that still read the version before from this receiver when it stages the
            next may go on for so long; then they must get the rest elsewhere.
        reuse: ``nothing`` fetches every version whole. ``pieces`` leaves out what did not change
            at all, such as frozen parameters. ``changes`` fetches of the rest only the elements
            that changed, from senders that still have the version before (for this, see
            `SenderConfig.num_bases`), over transports that send messages; worth it where the
            network is slower than 2 GB/s or so.
        anchor_every: After so many versions in a row that reuse another, one is fetched whole.
    """

    transport: str = "auto"
    bucket_bytes: int = 16 << 20
    num_threads: int = field(default_factory=usual_threads)
    token: str = ""
    connect_timeout_s: float = 60.0
    mode: Mode = "staged"
    serve_host: str = ""
    directory: str = ""
    group: str = ""
    name: str = ""
    prefer: Preference = "senders"
    host: str = ""
    stall_s: float = 60.0
    linger_s: float = 5.0
    reuse: Reused = "nothing"
    anchor_every: int = 64

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1024 or self.num_threads < 1:
            raise ConfigurationError("bucket_bytes must be >= 1024 and num_threads >= 1")
        check_choice("mode", self.mode, Mode)
        check_choice("prefer", self.prefer, Preference)
        check_wait("stall_s", self.stall_s)
        check_wait("connect_timeout_s", self.connect_timeout_s)
        if self.serve_host:
            check_exposure(self.serve_host, self.token)
            check_address(self.serve_host)
        if self.directory:
            parse_endpoint(self.directory)
        ReusePolicy(self.reuse, self.anchor_every)
