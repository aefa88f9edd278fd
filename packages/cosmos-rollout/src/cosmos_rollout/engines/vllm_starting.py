"""Why vLLM did not start, and what to change: from what its processes say to an error of ours.

The engine's process tells its owner no more than that it failed; why stands in its log alone. The
owner therefore sends a `StartReport` along in vLLM's configuration, and finds the reason there::

    owner ── configuration with a StartReport ──► engine's process ── the error it logs ──► file
      ▲                                                                                      │
      └───────────── EngineSettingsError, EngineMemoryError or EngineStartError ◄────────────┘
"""

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cosmos_rollout.errors import EngineMemoryError, EngineSettingsError, EngineStartError
from cosmos_rollout.script_guard import IF_MAIN, lacking_guard

_MIB = 1 << 20
_WITHOUT_MEMORY = (
    "out of memory",
    "outofmemory",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
    "available memory on node",
    "no available memory",
    "free memory on device",
)
_OF_SHARE = "desired gpu memory utilization"
_MEASURING = "error in memory profiling"
_TOO_SMALL = "larger than the available kv cache memory"
_KILLED = re.compile(r"': -9\b")
_AT_ONCE = "Failed core proc(s): {}"  # it ended before vLLM's own code ran in it
_IF_MAIN = f"of its processes {IF_MAIN}"


class StartReport:
    """A file in which the engine's process leaves why it did not start.

    It is what vLLM calls an additional configuration; pickled with the rest of it.
    """

    def __init__(self, path: Path) -> None:
        """Use a file that only this engine has; it need not be there."""
        self._path = path

    def compute_hash(self) -> str:
        """Return nothing: what is compiled does not depend on it."""
        return ""

    def listen(self) -> None:
        """Write down every error that vLLM logs in this process from now on."""
        logging.getLogger("vllm").addHandler(_LastError(self._path))

    def read(self) -> str:
        """Return the last error, empty if none was left."""
        return self._path.read_text() if self._path.exists() else ""


class _LastError(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and self._path.parent.is_dir():  # gone once the engine has started
            self._path.write_text(f"{type(error).__name__}: {error}")


def check_cache_fits(arguments: Mapping[str, Any], total_bytes: int) -> None:
    """Refuse a KV cache that is larger than the memory there is.

    Args:
        arguments: of vLLM, by its names.
        total_bytes: memory of the device, used or not.

    Raises:
        EngineSettingsError: naming the setting.
    """
    asked = int(arguments.get("kv_cache_memory_bytes") or 0)
    if asked > total_bytes:
        raise EngineSettingsError(
            f"kv_cache_mib is {asked // _MIB}, and the device of the engine has "
            f"{total_bytes // _MIB} MiB of memory in all; set kv_cache_mib lower"
        )


def check_script(start_method: str, main: ModuleType | None = None) -> None:
    """Refuse to start processes that would import a script which starts them wherever it is.

    Args:
        start_method: by which multiprocessing starts vLLM's processes; one that is forked imports
            nothing.
        main: what the script runs in; this process's by default.

    Raises:
        EngineStartError: saying what to write.
    """
    words = "" if start_method == "fork" else lacking_guard(main)
    if words:
        raise EngineStartError(f"vLLM was not started: of its processes {words}")


def refused_settings(error: Exception, names: Sequence[str]) -> EngineSettingsError:
    """Return the error for settings that vLLM refuses before it starts a process.

    Args:
        error: vLLM's.
        names: of the arguments that it has.
    """
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown is None:
        return EngineSettingsError(f"vLLM refuses its model or settings: {error}")
    close = difflib.get_close_matches(unknown[1], names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return EngineSettingsError(f"extra.{unknown[1]}: vLLM has no such argument{meant}")


def failed_start(said: str, reason: str, arguments: Mapping[str, Any]) -> EngineStartError:
    """Return the error for an engine whose process did not come up.

    Args:
        said: what the owner was told.
        reason: what the engine's process left in its report; may be empty.
        arguments: of vLLM, by its names.
    """
    words = reason or said
    if _TOO_SMALL in words.lower() and arguments.get("kv_cache_memory_bytes"):
        return EngineSettingsError(
            f"vLLM did not start: {words}\nset kv_cache_mib higher, or context_length lower"
        )
    is_short = any(mark in words.lower() for mark in _WITHOUT_MEMORY) or _TOO_SMALL in words.lower()
    if not is_short and _KILLED.search(said):
        words = f"its process was killed, as Linux does when memory runs out ({words})"
        is_short = True
    if is_short:
        return EngineMemoryError(f"vLLM did not start: {words}\n{_advice(words, arguments)}")
    if _MEASURING in words.lower():
        words += (
            "\nanother process freed memory of this device while the engine measured what is left; "
            "start it again once the others are up, or set kv_cache_mib, which measures nothing"
        )
    if "freeze_support" in said:  # Python's own words of it, many lines
        words = _IF_MAIN
    elif not reason and _AT_ONCE in said:
        words = f"{said} {_IF_MAIN}"
    return EngineStartError(f"vLLM did not start: {words}")


def _advice(words: str, arguments: Mapping[str, Any]) -> str:
    cache = int(arguments.get("kv_cache_memory_bytes") or 0)
    if cache and _OF_SHARE not in words.lower():
        return (
            f"kv_cache_mib is {cache // _MIB}: set it lower, share the model among more devices "
            "by tensor_parallel, or free memory that others use"
        )
    return (
        f"gpu_memory_share is {arguments.get('gpu_memory_utilization')}: set it lower if others "
        "use the device, higher if the model leaves no room; or set context_length lower, or "
        "tensor_parallel higher"
    )
