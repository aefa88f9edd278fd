"""A process of a small world: what it was told and has not read, what it samples and loads."""

from dataclasses import dataclass, field

from cosmos_core.messages import (
    Command,
    GroupFailed,
    GroupFinished,
    GroupId,
    LoadVersion,
    SampleRef,
)


@dataclass
class Replica:
    """A process; a rollout says where it serves weights, and passes on what it is being sent.

    Attributes:
        name: of the replica.
        incarnation: of the process.
        machine: it runs on; policy replicas share one.
        version: of its weights.
        published: a policy replica's newest that it serves.
        num_fall_backs: a policy replica's lineage.
        loaded: version and lineage of the weights that a rollout was sent last.
        serves: whether a rollout gives these to others.
        inbox: what it was told.
        sampling: attempt, samples, oldest and newest version of its groups.
        loading: what it was told to load, and has begun with.
        is_alive: until it is killed.
    """

    name: str
    incarnation: str
    machine: str = ""
    version: int = 0
    published: int = 0
    num_fall_backs: int = 0
    loaded: tuple[int, int] = (-1, 0)
    serves: bool = False
    inbox: list[Command] = field(default_factory=list)
    sampling: dict[GroupId, tuple[int, int, int, int]] = field(default_factory=dict)
    loading: LoadVersion | None = None
    is_alive: bool = True

    def gives(self, order: LoadVersion) -> bool:
        """Whether who is told to load from here finds that version, whole."""
        if not self.is_alive:
            return False
        if not order.holder:
            return self.published >= order.version
        return self.serves and self.loaded[0] == order.version

    def will_give(self, order: LoadVersion) -> bool:
        """Whether that version is being sent to this one itself, or is about to be."""
        orders = [self.loading, *self.inbox]
        return self.is_alive and any(
            isinstance(each, LoadVersion)
            and (each.version, each.lineage) == (order.version, order.lineage)
            for each in orders
        )

    def finish_group(self, choice: int) -> GroupFinished | GroupFailed:
        """Return what becomes of the group that it was given first: a number says what."""
        group, (attempt, num, oldest, _) = next(iter(self.sampling.items()))
        del self.sampling[group]
        if choice % 7 == 0:
            return GroupFailed(
                replica=self.name,
                group=group,
                attempt=attempt,
                reason="engine",
                drop_as="prompt too long" if choice % 2 else "",
            )
        samples = tuple(
            SampleRef(
                sibling=sibling,
                status="failed" if choice % 11 == 0 else "completed",
                unrewarded_by="mine" if choice % 11 == 0 else "",
                failure="reward mine: it raises" if choice % 11 == 0 else "",
                key=f"{group}/{attempt}/{sibling}",
                num_tokens=3,
                reward=float(sibling * (choice % 5)),
                oldest_version=oldest,
                newest_version=max(oldest, self.version),
            )
            for sibling in range(num)
        )
        return GroupFinished(replica=self.name, group=group, attempt=attempt, samples=samples)
