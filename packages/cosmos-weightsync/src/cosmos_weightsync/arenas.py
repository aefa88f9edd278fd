"""Tensors in one stretch of memory that another process of this host can map.

The stretch is an anonymous file (`memfd_create`): it has no name, so nothing is left behind by a
process that is killed, and it does not count against the size of ``/dev/shm``. Where there is no
such thing an arena is ordinary memory; also where that is asked for.

A stretch is page-locked as it is: what torch page-locks is as long as the next power of two.
"""

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cosmos_weightsync.errors import TransferError

__all__ = ["ALIGNMENT", "Arena", "Memory", "map_arena"]

Memory = Literal["shared", "private", "pinned"]

ALIGNMENT = 64
"""A cache line. Copies between differently aligned addresses are several times slower."""

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""``MADV_POPULATE_...`` of Linux 5.14: take all pages at once rather than each on first use."""

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices


class Arena:
    """Memory for a list of tensors.

    Args:
        shapes: Of the tensors.
        dtypes: Of the tensors.
        memory: ``shared`` can be mapped by other processes of this host, where the system has
            such memory. ``private`` cannot, and may lie in huge pages, which the system copies
            out of faster. ``pinned`` is for a GPU to copy into, and otherwise as ``shared``.

    Attributes:
        tensors: The tensors, contiguous, uninitialised.
        descriptor: Of the anonymous file, ``None`` for ordinary memory. Closed with the arena;
            mappings of it live on.
        key: Tells this arena from others of this process; 0 for ordinary memory.
        num_bytes: The size of the file.

    Raises:
        TransferError: the memory cannot be page-locked.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        *,
        memory: Memory = "shared",
    ) -> None:
        offsets, size = _offsets(shapes, dtypes)
        self.num_bytes = max(size, mmap.PAGESIZE)
        self.descriptor: int | None = None
        self.key = 0
        if sys.platform == "linux" and memory != "private":
            self.descriptor = os.memfd_create("cosmos-weightsync", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.descriptor)
            os.ftruncate(self.descriptor, self.num_bytes)
            self.key = os.fstat(self.descriptor).st_ino
            mapping = mmap.mmap(self.descriptor, self.num_bytes)
            _advise(mapping, _POPULATE_WRITE)
            held = torch.frombuffer(mapping, dtype=torch.uint8)
            if memory == "pinned":
                _page_lock(self, held)
        elif sys.platform == "linux" and memory == "private":
            mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _advise(mapping, mmap.MADV_HUGEPAGE)
            _advise(mapping, _POPULATE_WRITE)
            held = torch.frombuffer(mapping, dtype=torch.uint8)
        else:
            held = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=memory == "pinned")
        self._start = held.data_ptr()
        self.tensors = tuple(
            held[offset : offset + _num_bytes(shape, dtype)].view(dtype).view(tuple(shape))
            for offset, shape, dtype in zip(offsets, shapes, dtypes, strict=True)
        )

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where in the file a view of one of the tensors begins; ``None`` if it is elsewhere."""
        offset = tensor.data_ptr() - self._start
        return offset if self.descriptor is not None and 0 <= offset < self.num_bytes else None


def _page_lock(arena: Arena, memory: Tensor) -> None:
    """Have GPUs copy from and to memory by themselves, for as long as the arena lives."""
    runtime: Any = torch.cuda.cudart()
    place, num_bytes = memory.data_ptr(), memory.numel()
    failure = int(runtime.cudaHostRegister(place, num_bytes, _PORTABLE))
    if failure:
        raise TransferError(
            f"{num_bytes} bytes of host memory for a copy of the weights cannot be page-locked "
            f"(CUDA error {failure}): is so much free?"
        )
    weakref.finalize(arena, runtime.cudaHostUnregister, place).atexit = False


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _offsets(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> tuple[list[int], int]:
    offsets: list[int] = []
    end = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = offsets[-1] + _num_bytes(shape, dtype)
    return offsets, end


def map_arena(descriptor: int, num_bytes: int) -> Tensor:
    """Map another process's arena for reading, as bytes.

    The mapping is private: what is written to it by mistake never reaches the other process.

    Raises:
        OSError: the descriptor is no file of this size.
    """
    if os.fstat(descriptor).st_size < num_bytes:  # Reading past the end would be fatal.
        raise OSError(f"the memory has less than the {num_bytes} bytes announced")
    mapping = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
    _advise(mapping, _POPULATE_READ)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _advise(mapping: mmap.mmap, advice: int) -> None:
    with contextlib.suppress(OSError):  # An older kernel takes page by page.
        mapping.madvise(advice)
