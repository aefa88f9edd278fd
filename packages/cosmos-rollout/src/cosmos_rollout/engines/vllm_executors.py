"""vLLM executors whose engine process ends with the process that started it.

vLLM's engine core does not notice that its owner was killed: it idles on for ever with its memory
(seen with 0.32). An executor is the first thing of ours that runs in that process. Choosing one
explicitly also keeps the worker inside the engine process on CPU, which halves the start; and that
worker computes with weights in formats that vLLM emulates on any device, but lists for none on CPU.
"""

import os

from vllm.config import VllmConfig
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.platforms import PlatformEnum, current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from cosmos_rollout.engines.vllm_starting import StartReport
from cosmos_rollout.tether import die_with


class TetheredUniProcExecutor(UniProcExecutor):
    """One worker, inside the engine process."""

    def _init_executor(self) -> None:
        die_with(os.getppid())
        _report_errors(self.vllm_config)
        if current_platform.is_cpu():
            register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
            register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
        super()._init_executor()


class TetheredMultiprocExecutor(MultiprocExecutor):
    """Several workers; they end with the engine process by vLLM's own pipe."""

    def _init_executor(self) -> None:
        die_with(os.getppid())
        _report_errors(self.vllm_config)
        super()._init_executor()


def _report_errors(config: VllmConfig) -> None:
    report: object = config.additional_config
    if isinstance(report, StartReport):
        report.listen()
