"""Receivers of one group put a version to use together, or not at all.

```
stage ─► ready ─► the directory counts ─► commit   everybody who is ready commits
                                      └─► abort    everybody keeps the version before
         nothing decided in time ─► ready is taken back, unless the decision was faster
```
A decision is final. A receiver that dies before it commits has the version before; the directory
does not wait for the dead.
"""

from collections.abc import Callable

from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DeadlineError, QuorumError
from cosmos_weightsync.membership import Decision, Quorum

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
        QuorumError: the group does not; the version in use stays.
        DeadlineError: it did not decide in time; the version in use stays.
    """
    number, run_id = version
    decision: Decision = "open"
    try:
        while decision == "open":
            decision = attendance.vote(number, "ready", quorum, deadline, run_id=run_id)
    except DeadlineError:
        soon = Deadline.after(GRACE_S)
        decision = attendance.vote(number, "withdrawn", quorum, soon, run_id=run_id)
        if decision == "open":
            raise
    if decision == "abort":
        raise QuorumError(
            f"version {number} is not committed: too many receivers of the group failed"
        )
    return commit()
