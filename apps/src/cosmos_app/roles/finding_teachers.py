"""Where a rollout replica finds the teachers of its run."""

import contextlib
from typing import Any

import click

from cosmos_app.control_files import OWN_TEACHER, read_teacher_token, teacher_urls
from cosmos_app.prepared_data import open_prompts
from cosmos_app.roles.process import RunContext
from cosmos_app.server_tokens import compare_tokens
from cosmos_rollout import TeacherReplicas, TeacherSettings

_MOST_ROWS = 16


async def find_teacher(
    context: RunContext, ended: contextlib.AsyncExitStack
) -> TeacherReplicas | None:
    """Return who scores samples beside their rewards, once somebody does.

    Raises:
        TeacherError: if nobody does in time.
        ServerMismatchError: if somebody else's server has other tokens than the model.
    """
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
    if chosen.urls:
        await _require_one_vocabulary(context, teacher, chosen.urls[0])
    return teacher


async def _require_one_vocabulary(context: RunContext, teacher: TeacherReplicas, whom: str) -> None:
    """Look at what no directory tells: whether a server's numbers mean the tokens of the model."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(context.files.model)
    prompts = open_prompts(context.recipe, context.files)["train"]
    rows = (prompts.row(ordinal) for ordinal in range(_MOST_ROWS))
    if warning := await compare_tokens(teacher.tokens_of, whom, tokenizer, rows):
        click.echo(warning, err=True)
