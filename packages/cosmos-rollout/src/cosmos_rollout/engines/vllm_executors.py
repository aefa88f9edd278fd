"""vLLM executors whose engine process ends with the process that started it.

vLLM's engine core does not notice that its owner was killed: it idles on for ever with its memory
(seen with 0.32). An executor is the first thing of ours that runs in that process. Choosing one
explicitly also keeps the worker inside the engine process on CPU, which halves the start.
"""

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from cosmos_rollout.tether import die_with


class TetheredUniProcExecutor(UniProcExecutor):
    """One worker, inside the engine process."""

    def _init_executor(self) -> None:
        die_with(os.getppid())
        super()._init_executor()


class TetheredMultiprocExecutor(MultiprocExecutor):
    """Several workers; they end with the engine process by vLLM's own pipe."""

    def _init_executor(self) -> None:
        die_with(os.getppid())
        super()._init_executor()
