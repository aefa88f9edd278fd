"""Receivers of one group put a version to use together, or not at all.

```
stage ─► ready(digest) ─► the directory counts ─► commit   everybody who is ready commits
                             and compares      └─► abort    everybody keeps the version before
         nothing decided in time ─► ready is taken back, unless the decision was faster
```
A decision is final. A receiver that dies before it commits has the version before; the directory
does not wait for the dead.
"""

from collections.abc import Callable

from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.ballots import Quorum, Standing
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DeadlineError, DigestError, QuorumError

__all__ = ["commit_together"]

GRACE_S = 10.0
"""Taking a vote back must reach the directory, or it could still decide with it."""


def commit_together(
    attendance: Attendance,
    version: tuple[int, str],
    quorum: Quorum,
    commit: Callable[[], int],
    deadline: Deadline,
) -> int:
    """Commit a staged version as soon as the group does.

    Args:
        attendance: This member's.
        version: Its number, and the run of the trainer that made it.
        quorum: Equal for all of the group.
        commit: Does it; returns the version in use from then on.
        deadline: When to give up.

    Raises:
        DigestError: another of the group has other bytes in the same pieces; the version in use
            stays.
        QuorumError: the group does not, and who failed; the version in use stays.
        DeadlineError: it did not decide in time, and who was waited for; the version in use stays.
    """
    number, run_id = version
    standing = Standing("open")
    try:
        while standing.decision == "open" and not standing.unlike:
            standing = attendance.vote(number, "ready", quorum, deadline, run_id=run_id)
    except DeadlineError as error:
        soon = Deadline.after(GRACE_S)
        standing = attendance.vote(number, "withdrawn", quorum, soon, run_id=run_id)
        if standing.decision == "open" and standing.missing:
            raise DeadlineError(
                f"version {number} is not committed: no time left waiting for "
                f"{'; '.join(standing.missing)}"
            ) from error
        if standing.decision == "open":
            raise
    if standing.unlike:
        raise DigestError(
            f"version {number} is not committed: {standing.unlike} has other bytes in the same "
            "pieces of it; those who hold these do not have the same weights"
        )
    if standing.decision == "abort":
        failed = f": {'; '.join(standing.failed)}" if standing.failed else ""
        raise QuorumError(
            f"version {number} is not committed: too many receivers of the group failed{failed}"
        )
    return commit()
