"""The process of one reward: started when it is needed, killed when it hangs, started again."""

import asyncio
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from cosmos_app.errors import RunError

_END_S = 5.0
_WORKER = "cosmos_app.wfm.reward_service.worker"
_VAE = "diffusers.models.autoencoders.autoencoder_kl_wan"  # takes seconds to import


class ScoringProcessError(RunError):
    """Raised when the process of a reward ended, or did not answer in time."""


class ScoringProcess:
    """Scores the requests of one reward, one at a time, in a process of its own.

    Only bytes of requests and JSON go through its pipe.

    Attributes:
        name: of the reward.
        num_starts: processes that were started so far.
    """

    def __init__(self, name: str, named: str, *, deadline_s: float, latent_vae: str = "") -> None:
        """Start nothing yet.

        Args:
            name: of the reward.
            named: ``module:function`` of one's own, the directory of a model, or empty.
            latent_vae: directory of what decodes latents, or empty.
            deadline_s: for loading the reward, and for each request.
        """
        self.name = name
        self.num_starts = 0
        self._named = named
        self._latent_vae = latent_vae
        self._deadline_s = deadline_s
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{name}")

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process, if there is none, and wait until the reward is loaded.

        Raises:
            ScoringProcessError: if it ended or took too long.
        """
        if self._process is not None and self._process.is_alive():
            return
        await self._end()
        self.num_starts += 1
        await self._within_deadline(self._launch)

    async def score(self, body: bytes) -> dict[str, Any]:
        """Return the answer to a request: its scores, or an ``error``.

        Raises:
            ScoringProcessError: if the process ended or took too long; it is gone then.
        """
        await self.start()
        return await self._within_deadline(lambda: self._exchange(body))

    async def close(self) -> None:
        """End the process, killing what it works on; may be called twice."""
        await self._end()
        self._thread.shutdown(wait=False)

    def _launch(self) -> dict[str, Any]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_WORKER, *([_VAE] if self._latent_vae else [])])
        from cosmos_app.wfm.reward_service.worker import score_requests

        self._pipe, theirs = context.Pipe()
        with theirs:
            self._process = context.Process(
                target=score_requests,
                args=(self.name, self._named, self._latent_vae, theirs),
                daemon=True,
            )
            self._process.start()
        return json.loads(self._pipe.recv_bytes())

    def _exchange(self, body: bytes) -> dict[str, Any]:
        assert self._pipe is not None
        self._pipe.send_bytes(body)
        return json.loads(self._pipe.recv_bytes())

    async def _within_deadline(self, exchange: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a blocking exchange in the thread of this process; what ends the process ends it."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, exchange)
        done, _ = await asyncio.wait([running], timeout=self._deadline_s)
        if not done:
            await self._end()
            await asyncio.wait([running])
            raise ScoringProcessError(
                f"{self.name}: no answer in {self._deadline_s:g} s; its process was killed"
            )
        try:
            return running.result()
        except (EOFError, OSError) as error:
            code = await self._end(grace_s=_END_S)
            raise ScoringProcessError(f"{self.name}: its process ended with {code}") from error

    async def _end(self, *, grace_s: float = 0.0) -> int | None:
        """End the process, by force unless it does so by itself in time; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        await asyncio.to_thread(process.join, grace_s)
        if process.exitcode is None:
            process.kill()
            await asyncio.to_thread(process.join)
        code = process.exitcode
        process.close()
        if self._pipe is not None:
            self._pipe.close()
        return code
