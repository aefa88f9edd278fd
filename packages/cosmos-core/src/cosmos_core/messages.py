"""What replicas and the controller say to each other: events go up, commands come down.

Every message is a tagged, frozen msgspec struct, so that a record in the bus, in the log and in a
test is the same value. Messages name tensors and trajectories, they never hold them.
"""

from typing import Literal, get_args

import msgspec

Role = Literal["policy", "rollout"]
SampleStatus = Literal["completed", "failed"]
SCALED_DOWN = "fewer replicas of its kind are wanted"


class GroupId(msgspec.Struct, frozen=True, order=True):
    """One issued prompt: its stream and its position in that stream.

    ``source`` is ``"train"`` or ``"validation"``; ``round`` tells validations apart by the weight
    version they measure (0 for training); ``ordinal`` counts prompts of that stream from 0.
    """

    source: str
    round: int
    ordinal: int

    def __str__(self) -> str:
        """Return the key used in the bus and in logs, ``source.round.ordinal``."""
        return f"{self.source}.{self.round}.{self.ordinal}"


class SampleRef(msgspec.Struct, frozen=True, kw_only=True):
    """All that the controller knows of a finished sample; the trajectory itself is at ``key``.

    ``oldest_version`` and ``newest_version`` are the weight versions that sampled its first and
    last trained token. ``num_tokens`` are those that are trained, ``length`` all that a pass goes
    over, those of the prompt and of tools too; ``truncated`` that a limit of tokens cut it off.
    ``rewards`` are the parts of its reward with their names, ``data_set`` names the set that its
    prompt is from, where there are several. A failed sample has no key and no reward and is never
    trained on; ``failure`` says what happened, and ``unrewarded_by`` which reward raised at it or
    gave no finite number, if that is what did.
    """

    sibling: int
    status: SampleStatus
    key: str = ""
    num_tokens: int = 0
    length: int = 0
    reward: float = 0.0
    oldest_version: int = 0
    newest_version: int = 0
    truncated: bool = False
    failure: str = ""
    unrewarded_by: str = ""
    rewards: tuple[tuple[str, float], ...] = ()
    data_set: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Common parent of events and commands; never sent itself."""


class ReplicaJoined(Message, frozen=True, kw_only=True, tag=True):
    """A replica is ready for commands, holds no work, and what it was given before is void.

    ``slots`` is how many groups a rollout replica holds at once (0 for a policy replica);
    ``version`` the weights it holds now, -1 if it must load some before it can sample;
    ``endpoints`` where a policy replica serves that version and later ones, one per rank: without,
    no rollout replica is told to load them; or where a rollout replica will serve what it loads;
    ``lineage`` is that of its weights (`cosmos_core.lineage`). ``host`` is the machine it runs on,
    by any name that others there use too. ``published`` is the version that a policy replica serves
    where that is another than the one it holds. ``incarnation`` tells processes of one name apart;
    the bus fills both in.
    ValueError for another role, and for a rollout replica without slots.
    """

    replica: str
    role: Role
    slots: int = 0
    version: int = 0
    lineage: int = 0
    endpoints: tuple[str, ...] = ()
    host: str = ""
    published: int | None = None
    incarnation: str = ""

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(
                f"replica {self.replica}: role is {self.role!r}; want one of {get_args(Role)}"
            )
        if self.role == "rollout" and self.slots < 1:
            raise ValueError(
                f"rollout replica {self.replica}: slots is {self.slots}; want 1 or more, the "
                "groups it holds at once"
            )


class ReplicaLeft(Message, frozen=True, kw_only=True, tag=True):
    """A replica is gone: it said so, its launcher saw it die, or its lease ran out."""

    replica: str
    reason: str


class Progress(Message, frozen=True, kw_only=True, tag=True):
    """The loop that does the work is alive; renews the lease of the replica."""

    replica: str
    count: int


class GroupFinished(Message, frozen=True, kw_only=True, tag=True):
    """Every sample of one attempt at a group is scored and stored."""

    replica: str
    group: GroupId
    attempt: int
    samples: tuple[SampleRef, ...]


class GroupFailed(Message, frozen=True, kw_only=True, tag=True):
    """One attempt at a group came to nothing; an infrastructure failure is never a sample.

    ``drop_as`` is empty, or a few words for what is wrong with the prompt itself: whoever tried it
    again would fail too, so it is dropped and counted under these words.
    """

    replica: str
    group: GroupId
    attempt: int
    reason: str
    drop_as: str = ""


class StepFinished(Message, frozen=True, kw_only=True, tag=True):
    """A policy replica took step ``step`` and now holds weight version ``step + 1``.

    This and all else that it says of weights carries their ``lineage``: what it says of those that
    the run has fallen back from counts for nothing.
    """

    replica: str
    step: int
    lineage: int = 0


class VersionPublished(Message, frozen=True, kw_only=True, tag=True):
    """A policy replica serves this weight version: its snapshot is taken.

    ``stall_s`` is how long it stood still for that, the rank that did so longest; 0 if it is not
    known.
    """

    replica: str
    version: int
    lineage: int = 0
    stall_s: float = 0.0


class PublicationSkipped(Message, frozen=True, kw_only=True, tag=True):
    """A policy replica has this weight version and serves it to nobody yet: it waits for no reader.

    Others are being read in all the memory that it has for snapshots; ``held_by`` says which, by
    whom. It publishes this version while it waits for a step, or else the next one. ``stall_s`` is
    how long it stood still to find that out.
    """

    replica: str
    version: int
    lineage: int = 0
    stall_s: float = 0.0
    held_by: str = ""


class VersionLoaded(Message, frozen=True, kw_only=True, tag=True):
    """A rollout replica verified and committed this weight version: it samples with it now.

    ``endpoints`` are where it serves that version to replicas that join; none if it does not.
    """

    replica: str
    version: int
    transfer_s: float
    stall_s: float
    lineage: int = 0
    endpoints: tuple[str, ...] = ()


class LoadFailed(Message, frozen=True, kw_only=True, tag=True):
    """A rollout replica could not load this version and still samples with the one before."""

    replica: str
    version: int
    reason: str
    lineage: int = 0


class CheckpointSaved(Message, frozen=True, kw_only=True, tag=True):
    """A policy replica's checkpoint taken after step ``step`` is durable.

    Without a path it has saved nothing: there is nothing yet, or another replica writes it.
    """

    replica: str
    step: int
    path: str
    lineage: int = 0


class StopRequested(Message, frozen=True, kw_only=True, tag=True):
    """Somebody asked the run to end cleanly: finish the step in hand, checkpoint, stop."""

    reason: str


class ScaleRequested(Message, frozen=True, kw_only=True, tag=True):
    """Somebody asked for this many replicas; those beyond it finish what they hold and stop.

    Who started the run starts those that are missing; -1 leaves their number as it is. The number
    of policy replicas changes only in runs where they come and go.
    """

    rollouts: int = -1
    policies: int = -1


class Tick(Message, frozen=True, kw_only=True, tag=True):
    """Time passed; leases are looked at."""


Event = (
    ReplicaJoined
    | ReplicaLeft
    | Progress
    | GroupFinished
    | GroupFailed
    | StepFinished
    | VersionPublished
    | PublicationSkipped
    | VersionLoaded
    | LoadFailed
    | CheckpointSaved
    | StopRequested
    | ScaleRequested
    | Tick
)


class Generate(Message, frozen=True, kw_only=True, tag=True):
    """Rollout: sample a group; its source tells how, as validation has a sampling of its own.

    ``withheld_s`` is for how long admission withheld a prompt from this replica, which held none
    until now; 0 if it held others, or has been given this one as soon as the controller knew.
    """

    group: GroupId
    attempt: int
    num_samples: int
    withheld_s: float = 0.0


class CancelGroup(Message, frozen=True, kw_only=True, tag=True):
    """Rollout: this attempt is no longer wanted."""

    group: GroupId
    attempt: int


class LoadVersion(Message, frozen=True, kw_only=True, tag=True):
    """Rollout: fetch this version (or a newer one) from these endpoints, commit, acknowledge.

    The answer repeats the ``lineage``, by which one to an order from before a fall-back is known.
    ``holder`` names the rollout replica that serves there, or will; empty for a policy replica.
    ``described_by`` are the endpoints of a policy replica then, if this replica has loaded nothing:
    that one knows the tensors already.
    """

    version: int
    endpoints: tuple[str, ...]
    lineage: int = 0
    holder: str = ""
    described_by: tuple[str, ...] = ()


class Train(Message, frozen=True, kw_only=True, tag=True):
    """Policy: take step ``step`` on these groups; every policy replica gets the same list.

    ``cut`` is the controller's own state to be stored in a checkpoint of this step, msgpack;
    empty when no checkpoint is due. ``publish`` orders a snapshot of version ``step + 1``, or to
    skip it where there is no room for one.
    ``line`` says which weights the step is taken from; for who has others it is a `FallBack`.
    ``validated_s`` is for how long validations held this one up.
    """

    step: int
    groups: tuple[tuple[SampleRef, ...], ...]
    publish: bool
    cut: bytes = b""
    line: tuple[int, ...] = ()
    validated_s: float = 0.0


class FallBack(Message, frozen=True, kw_only=True, tag=True):
    """Policy: the run has fallen back to a checkpoint, and this is its line now.

    Who holds weights that are not on it, or are older than version ``saved``, of which there is a
    checkpoint, drops them: it ends with an error, and begins again as a newcomer. Others go on.
    """

    line: tuple[int, ...]
    saved: int = 0


class Stop(Message, frozen=True, kw_only=True, tag=True):
    """Any replica: finish what is in hand and leave; a policy saves first, with the cut.

    An empty ``cut`` is for a replica of which the run has not heard before its end: it has nothing
    to save.
    """

    reason: str
    cut: bytes = b""


Command = Generate | CancelGroup | LoadVersion | Train | FallBack | Stop

_EVENT_DECODER = msgspec.msgpack.Decoder(Event)
_COMMAND_DECODER = msgspec.msgpack.Decoder(Command)
_ENCODER = msgspec.msgpack.Encoder()


def encode_message(message: Message) -> bytes:
    """Return the msgpack form of an event or a command."""
    return _ENCODER.encode(message)


def decode_event(data: bytes) -> Event:
    """Read an event back.

    Raises:
        msgspec.ValidationError: if the bytes are not one of the events above.
    """
    return _EVENT_DECODER.decode(data)


def decode_command(data: bytes) -> Command:
    """Read a command back.

    Raises:
        msgspec.ValidationError: if the bytes are not one of the commands above.
    """
    return _COMMAND_DECODER.decode(data)
