"""vLLM executors whose engine process ends with the process that started it.

vLLM's engine core does not notice that its owner was killed: it idles on for ever with its memory
(seen with 0.32). An executor is the first thing of ours that runs in that process. Choosing one
explicitly also keeps the worker inside the engine process on CPU, which halves the start.
"""

import os
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.worker_base import WorkerBase

from cosmos_rollout.engines.vllm_starting import StartReport
from cosmos_rollout.tether import die_with


class TetheredUniProcExecutor(UniProcExecutor):
    """One worker, inside the engine process."""

    def _init_executor(self) -> None:
        die_with(os.getppid())
        _report_errors(self.vllm_config)
        if current_platform.is_cpu():
            # OpenMP has a number for each thread, and a forked process begins in one of its own
            torch.set_num_threads(torch.get_num_threads())
        super()._init_executor()


class TetheredMultiprocExecutor(MultiprocExecutor):
    """Several workers; they end with the engine process by vLLM's own pipe."""

    def _init_executor(self) -> None:
        die_with(os.getppid())
        _report_errors(self.vllm_config)
        super()._init_executor()
        if current_platform.is_cpu() and self.parallel_config.pipeline_parallel_size > 1:
            self.collective_rpc(_make_buffers_between_stages)


def _make_buffers_between_stages(worker: WorkerBase) -> None:
    """Do what vLLM leaves to a warm-up, which it goes without on a CPU whose cache has a size."""
    runner: Any = worker.model_runner  # typed as torch's Module by vLLM
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _report_errors(config: VllmConfig) -> None:
    report: object = config.additional_config
    if isinstance(report, StartReport):
        report.listen()
