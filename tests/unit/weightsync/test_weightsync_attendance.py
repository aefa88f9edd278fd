"""A member whose directory is gone, or does not want it."""

import time

import pytest

from cosmos_weightsync import DeadlineError, Quorum, WeightDirectory
from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.membership import Member


def test_a_group_that_cannot_ask_its_directory_names_that(stack):
    directory = stack.enter_context(WeightDirectory())
    attendance = Attendance(directory.endpoint, Member(id="a", role="receiver"), "")
    stack.callback(attendance.close, Deadline.after(30.0))
    directory.close()
    with pytest.raises(DeadlineError, match=f"waiting for the directory at {directory.endpoint}"):
        attendance.vote(1, "ready", Quorum(), Deadline.after(0.3))


def test_who_is_refused_by_a_directory_learns_why_nobody_is_there(stack):
    directory = stack.enter_context(WeightDirectory(token="secret"))
    member = Member(id="a", role="receiver")
    attendance = Attendance(directory.endpoint, member, "wrong")
    stack.callback(attendance.close, Deadline.after(30.0))

    def words() -> str:
        with pytest.raises(DeadlineError) as found:
            attendance.wait_for(lambda _: False, Deadline.after(0.05))
        return str(found.value)

    give_up = time.monotonic() + 30
    while "the token is not the directory's" not in words():
        assert time.monotonic() < give_up
