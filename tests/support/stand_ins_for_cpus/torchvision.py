"""The names of torchvision, whose PyPI build links CUDA, for programs that import but do not call.

SGLang imports its processors of pictures before it serves a model of text (decision 0307).
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []  # a package without files: its submodules come from the finder below


class _Name(type):
    """A class every attribute of which is that attribute's name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Names(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        inside = fullname.startswith(f"{__name__}.")
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
