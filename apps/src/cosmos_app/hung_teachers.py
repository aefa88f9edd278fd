"""Teachers that hang: asked for a word again and again, and killed when none has come for too long.

A teacher has no lease that it could lose: rollouts ask it over HTTP, and wait for it in vain.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from cosmos_app.control_files import read_teacher_token, teacher_url_file
from cosmos_app.supervisor import Supervisor
from cosmos_core.rundir import RunDirectory

_LOOK_S = 2.0
_WORD_S = 5.0


class HungTeachers:
    """Looks after the teachers that a run has started here.

    Args:
        run: where they leave their addresses.
        supervisor: of their processes.
        names: of theirs.
        silence_s: one that has not answered for so long is killed.
        say: tells who started the run.
    """

    def __init__(
        self,
        run: RunDirectory,
        supervisor: Supervisor,
        names: Sequence[str],
        silence_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Nobody has been asked yet."""
        self._run = run
        self._supervisor = supervisor
        self._unsaid_s = dict.fromkeys(names, 0.0)
        self._silence_s = silence_s
        self._say = say

    async def end(self) -> None:
        """Kill who does not answer, for ever; at once over where there are none."""
        if not self._unsaid_s:
            return
        headers = {"Authorization": f"Bearer {read_teacher_token(self._run)}"}
        async with httpx.AsyncClient(headers=headers, timeout=_WORD_S, trust_env=False) as client:
            while True:
                await asyncio.sleep(_LOOK_S)
                await asyncio.gather(*(self._look(client, name) for name in self._unsaid_s))

    async def _look(self, client: httpx.AsyncClient, name: str) -> None:
        begun = time.monotonic()
        if await self._answers(client, name):
            self._unsaid_s[name] = 0.0
            return
        # a launcher that was suspended meanwhile has not waited for all of that time
        self._unsaid_s[name] += _LOOK_S + min(time.monotonic() - begun, _WORD_S)
        if self._unsaid_s[name] >= self._silence_s:
            self._say(f"[yellow]{name} hangs: it has not answered for {self._silence_s:g} s[/]")
            self._supervisor.end_hung(name, time.time())
            self._unsaid_s[name] = 0.0

    async def _answers(self, client: httpx.AsyncClient, name: str) -> bool:
        """Whether a teacher answers, or has not begun to listen since its last start."""
        path = teacher_url_file(self._run, name)
        try:
            url, since_s = path.read_text(), path.stat().st_mtime
        except FileNotFoundError:
            return True
        if not self._supervisor.has_begun_before(name, since_s):
            return True
        try:
            await client.get(f"{url}/models")
        except httpx.HTTPError:
            return False
        return True
