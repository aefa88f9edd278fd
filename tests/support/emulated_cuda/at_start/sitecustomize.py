"""Have a process import torch with the emulated device; its library comes before torch looks."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

_LIBRARY = "EMULATED_CUDA_LIBRARY"


class _TorchFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_with_device(module):
            library = Path(os.environ[_LIBRARY])
            ctypes.CDLL(str(library))
            load(module)
            sys.path[:0] = [str(library.parent), str(Path(__file__).parents[1])]
            import in_torch

            del sys.path[:2]
            in_torch.install()

        spec.loader.exec_module = load_with_device
        return spec


if _LIBRARY in os.environ:
    sys.meta_path.insert(0, _TorchFirst())
