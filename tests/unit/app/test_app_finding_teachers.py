"""A rollout that waits for a teacher says for whom, and why it still waits."""

import socket

import pytest

from cosmos_app.roles.finding_teachers import wait_for_teacher
from cosmos_rollout import TeacherError, TeacherReplicas, TeacherSettings


async def test_who_is_not_there_is_named_while_it_is_waited_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    teacher = TeacherReplicas(lambda: [gone], TeacherSettings())
    said: list[str] = []
    with pytest.raises(TeacherError, match=r"no teacher answered within 1 s; at last: http"):
        await wait_for_teacher(teacher, 1.0, said.append, patience_s=0.3)
    await teacher.aclose()
    assert len(said) >= 2
    assert said[0].startswith(f"waits for a teacher, for 1 s at most; {gone}: ConnectError")
