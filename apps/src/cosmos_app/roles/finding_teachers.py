"""Where a rollout replica finds the teachers of its run."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import click

from cosmos_app.control_files import OWN_TEACHER, read_teacher_token, teacher_urls
from cosmos_app.prepared_data import open_prompts
from cosmos_app.roles.process import RunContext
from cosmos_app.server_tokens import compare_tokens
from cosmos_rollout import TeacherReplicas, TeacherSettings

_MOST_ROWS = 16
_PATIENCE_S = 10.0


async def find_teacher(
    context: RunContext, ended: contextlib.AsyncExitStack
) -> TeacherReplicas | None:
    """Return who scores samples beside their rewards, once somebody does.

    Raises:
        TeacherError: if nobody does in time.
        ServerMismatchError: if a server of somebody else has other tokens than the model.
    """
    chosen = context.recipe.teacher
    if not chosen.is_beside:
        return None
    if chosen.replicas:
        token, model = read_teacher_token(context.run), OWN_TEACHER
    else:
        token = chosen.key_file.read_text().strip() if chosen.key_file else ""
        model = chosen.model
    settings = TeacherSettings(
        model=model,
        token=token,
        top_k=chosen.top_k,
        deadline_s=chosen.deadline_s,
        max_running=chosen.max_running,
        show_pictures=chosen.replicas > 0,
    )
    teacher = TeacherReplicas(
        lambda: teacher_urls(context.run) if chosen.replicas else chosen.urls, settings
    )
    ended.push_async_callback(teacher.aclose)
    await wait_for_teacher(teacher, chosen.start_s, _say)
    if chosen.urls:
        await _require_one_vocabulary(context, settings)
    return teacher


async def wait_for_teacher(
    teacher: TeacherReplicas,
    deadline_s: float,
    say: Callable[[str], None],
    *,
    patience_s: float = _PATIENCE_S,
) -> None:
    """Return when a teacher answers; tell who does not, as often as the patience is over.

    Args:
        teacher: to wait for.
        deadline_s: longest to wait.
        say: shows a line.
        patience_s: seconds without a word.

    Raises:
        TeacherError: if none answered in time.
    """
    ready = asyncio.create_task(teacher.ready(deadline_s))
    try:
        while not (await asyncio.wait([ready], timeout=patience_s))[0]:
            say(f"waits for a teacher, for {deadline_s:g} s at most; {teacher.last_failure}")
        await ready
    finally:
        ready.cancel()


def _say(line: str) -> None:
    click.echo(line, err=True)


async def _require_one_vocabulary(context: RunContext, settings: TeacherSettings) -> None:
    """Look at what no directory tells: whether each server's numbers mean the tokens of the model.

    One that does not answer soon is let pass, as others may do without it.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(context.files.model)
    prompts = open_prompts(context.recipe, context.files)["train"]
    settings = replace(settings, deadline_s=min(_PATIENCE_S, settings.deadline_s))
    for url in context.recipe.teacher.urls:
        async with contextlib.aclosing(TeacherReplicas(partial(tuple, (url,)), settings)) as one:
            rows = (prompts.row(ordinal) for ordinal in range(_MOST_ROWS))
            if warning := await compare_tokens(one.tokens_of, url, tokenizer, rows):
                _say(warning)
