"""Publishing what a policy replica trains: all of its ranks or none, and waiting for no reader.

::

    step ─► each rank: a buffer that nobody reads? ─► all have one ─► copied, published
                                                  └─► not all ─► skipped; the next step's instead,
                                                      or this one while there is no step to take
"""

import json
import time
from dataclasses import dataclass

from cosmos_app.roles.ranks import gather_texts
from cosmos_core.messages import PublicationSkipped, VersionPublished
from cosmos_weightsync import WeightSender

_MOST_SAID = 600  # of 1024 bytes that a rank tells the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """What became of a version.

    Attributes:
        version: which.
        is_published: whether rollouts can have it; else it was skipped, by all ranks.
        stall_s: for how long training stood still, on the rank where that was longest.
        held_by: which versions were being read, by whom, where it was skipped.
    """

    version: int
    is_published: bool = True
    stall_s: float = 0.0
    held_by: str = ""

    @property
    def figures(self) -> dict[str, float]:
        """What is measured of it, by name."""
        skipped = float(not self.is_published)
        return {"publish_s": self.stall_s, "publications_skipped": skipped}

    def message(self, replica: str, lineage: int) -> VersionPublished | PublicationSkipped:
        """Return what the controller is told of it.

        Args:
            replica: name of the replica.
            lineage: that of the weights.
        """
        if self.is_published:
            return VersionPublished(
                replica=replica, version=self.version, lineage=lineage, stall_s=self.stall_s
            )
        return PublicationSkipped(
            replica=replica,
            version=self.version,
            lineage=lineage,
            stall_s=self.stall_s,
            held_by=self.held_by,
        )


def publish_together(sender: WeightSender, version: int) -> Publication:
    """Publish a version, or skip it where a rank has no room; every rank of the replica calls.

    What a rank stands still for is looking for a buffer and copying into it. That one rank comes
    later than others is no part of that: they would wait for it in the next step.

    Args:
        sender: of this rank.
        version: of the weights that it holds.
    """
    agreed_s = 0.0

    def agree(is_free: bool) -> bool:
        nonlocal agreed_s
        asked = time.perf_counter()
        answers = gather_texts("free" if is_free else "full")
        agreed_s = time.perf_counter() - asked
        return set(answers) == {"free"}

    began = time.perf_counter()
    found = sender.try_publish(version, agree=agree)
    own_s = time.perf_counter() - began - agreed_s
    told = json.dumps([own_s, agreed_s, "; ".join(found.readers)[:_MOST_SAID]])
    ranks = [json.loads(text) for text in gather_texts(told)]
    readers = [(rank, said) for rank, (_, _, said) in enumerate(ranks) if said]
    return Publication(
        version=version,
        is_published=found.is_published,
        stall_s=max(own for own, _, _ in ranks) + min(agreed for _, agreed, _ in ranks),
        held_by="; ".join(f"rank {rank}: {said}" for rank, said in readers),
    )
