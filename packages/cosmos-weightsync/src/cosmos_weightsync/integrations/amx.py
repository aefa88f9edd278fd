"""AMX, the matrix unit of some processors, for kernels that use it without asking."""

__all__ = ["ask_for_amx"]


def ask_for_amx() -> None:
    """Have Linux give this process the registers of AMX, if there are any.

    It does when it is asked, and vLLM's kernels do not ask (0.32). oneDNN does; where that has
    nothing to multiply, as every matrix is small or in blocks of FP8, the first request of more
    than a few tokens would end the process by SIGILL.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():  # pyright: ignore[reportPrivateUsage]
        torch.cpu._init_amx()  # pyright: ignore[reportPrivateUsage]
