"""vLLM's worker for CPUs, alone in the engine's process or one of several in their own."""

from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.platforms import PlatformEnum
from vllm.v1.worker.cpu_worker import CPUWorker


class EmulatingCPUWorker(CPUWorker):
    """Computes with weights in formats that vLLM emulates anywhere, but lists for no CPU."""

    def init_device(self) -> None:
        """Make them known before the model is built."""
        register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
        register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
        super().init_device()
