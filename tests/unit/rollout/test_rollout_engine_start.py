"""From what vLLM says when it does not start to an error that names the setting to change."""

import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rollout import EngineMemoryError, EngineSettingsError, EngineStartError
from cosmos_rollout.engines.vllm_starting import (
    StartReport,
    check_cache_fits,
    failed_start,
    refused_settings,
)

_GENERAL = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
_KILLED = "Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -9}"
_CACHE = {"kv_cache_memory_bytes": 512 << 20, "gpu_memory_utilization": 0.85}
_SHARE = {"gpu_memory_utilization": 0.85}


@pytest.mark.parametrize(
    ("said", "reason", "arguments", "kind", "key"),
    [
        (
            _GENERAL,
            "ValueError: Available memory on node 0 (0.2/0.3 GiB) on kv cache allocation is less "
            "than requested memory for kv (0.5 GiB).",
            _CACHE,
            EngineMemoryError,
            "kv_cache_mib is 512: set it lower",
        ),
        (
            _GENERAL,
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB",
            _SHARE,
            EngineMemoryError,
            "gpu_memory_share is 0.85",
        ),
        (
            _GENERAL,
            "ValueError: Free memory on device cuda:0 (3/80 GiB) on startup is less than desired",
            _SHARE,
            EngineMemoryError,
            "gpu_memory_share is 0.85",
        ),
        (
            _GENERAL,
            "ValueError: Free memory on device cuda:0 (3/80 GiB) on startup is less than desired "
            "GPU memory utilization (0.85, 68 GiB).",
            _CACHE,
            EngineMemoryError,
            "gpu_memory_share is 0.85",
        ),
        (
            _GENERAL,
            "AssertionError: Error in memory profiling. Initial free memory 138 GiB, current 139",
            _SHARE,
            EngineStartError,
            "start it again once the others are up, or set kv_cache_mib",
        ),
        # a cache of chosen size never grows; what others leave of a device may
        (
            _GENERAL,
            "ValueError: 2 GiB KV cache is needed, which is larger than the available KV cache "
            "memory (0.5 GiB).",
            _CACHE,
            EngineSettingsError,
            "set kv_cache_mib higher, or context_length lower",
        ),
        (
            _GENERAL,
            "ValueError: 2 GiB KV cache is needed, which is larger than the available KV cache "
            "memory (0.5 GiB).",
            _SHARE,
            EngineMemoryError,
            "context_length lower",
        ),
        (_KILLED, "", _CACHE, EngineMemoryError, "was killed, as Linux does when memory runs out"),
        (_GENERAL, "KeyError: 'lm_head'", _CACHE, EngineStartError, "KeyError: 'lm_head'"),
        # a process that ran nothing of vLLM: it imported a script that starts an engine as it runs
        (_GENERAL, "", _CACHE, EngineStartError, 'under `if __name__ == "__main__":`'),
    ],
)
def test_the_reason_decides_the_error_and_the_setting_it_names(
    said: str, reason: str, arguments: dict[str, float], kind: type[Exception], key: str
) -> None:
    error = failed_start(said, reason, arguments)
    assert type(error) is kind
    assert key in str(error)


def test_a_cache_larger_than_all_memory_is_refused_and_one_that_fits_is_not() -> None:
    check_cache_fits({"kv_cache_memory_bytes": 1 << 30}, 1 << 30)
    check_cache_fits({}, 1)
    with pytest.raises(EngineSettingsError, match=r"kv_cache_mib is 1025, .* has 1024 MiB"):
        check_cache_fits({"kv_cache_memory_bytes": 1025 << 20}, 1 << 30)


def test_an_argument_that_vllm_does_not_have_is_named_with_the_closest_one() -> None:
    error = TypeError("__init__() got an unexpected keyword argument 'max_num_seq'")
    named = refused_settings(error, ["max_num_seqs", "model"])
    assert "extra.max_num_seq: vLLM has no such argument; did you mean 'max_num_seqs'?" in str(
        named
    )
    other = refused_settings(ValueError("block_size: 7 is none of 16, 32"), [])
    assert "block_size: 7 is none of 16, 32" in str(other)


def test_a_report_keeps_the_last_error_that_its_process_logs(tmp_path: Path) -> None:
    mine = StartReport(tmp_path / "error")
    theirs = pickle.loads(pickle.dumps(mine))
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    try:
        theirs.listen()
        assert mine.read() == ""
        logger.getChild("v1.engine").error("no exception, no reason")
        assert mine.read() == ""
        try:
            raise MemoryError("no room for 3 GiB")
        except MemoryError:
            logger.getChild("v1.engine").exception("EngineCore failed to start.")
        assert mine.read() == "MemoryError: no room for 3 GiB"
        assert mine.compute_hash() == ""
    finally:
        for handler in set(logger.handlers) - set(before):
            logger.removeHandler(handler)


_WITHOUT_TORCH = """
import asyncio, sys
from pathlib import Path
from cosmos_rollout import EngineSetup, EngineStartError, TransformersConfig

sys.modules["torch"] = None
setup = EngineSetup(model_path=Path("my-model"))
for start in (TransformersConfig().build, TransformersConfig().build_scorer):
    try:
        asyncio.run(start(setup))
    except EngineStartError as error:
        print(error)
"""


def test_an_engine_that_needs_torch_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    said = "my-model: the transformers engine cannot be imported; install what it needs with "
    said += "pip install 'cosmos-rollout[torch]' ("
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(said) for line in lines)
