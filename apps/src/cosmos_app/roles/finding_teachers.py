"""Where a rollout replica finds the teachers of its run."""

import contextlib

from cosmos_app.control_files import OWN_TEACHER, read_teacher_token, teacher_urls
from cosmos_app.roles.process import RunContext
from cosmos_rollout import TeacherReplicas, TeacherSettings


async def find_teacher(
    context: RunContext, ended: contextlib.AsyncExitStack
) -> TeacherReplicas | None:
    """Return who scores samples beside their rewards, once somebody does."""
    chosen = context.recipe.teacher
    if not chosen.is_beside:
        return None
    if chosen.replicas:
        token, model = read_teacher_token(context.run), OWN_TEACHER
    else:
        token = chosen.key_file.read_text().strip() if chosen.key_file else ""
        model = chosen.model
    teacher = TeacherReplicas(
        lambda: teacher_urls(context.run) if chosen.replicas else chosen.urls,
        TeacherSettings(
            model=model,
            token=token,
            top_k=chosen.top_k,
            deadline_s=chosen.deadline_s,
            max_running=chosen.max_running,
            show_pictures=chosen.replicas > 0,
        ),
    )
    ended.push_async_callback(teacher.aclose)
    await teacher.ready(chosen.start_s)
    return teacher
