"""An `AsyncLLM` from its arguments, with errors of ours where vLLM does not start."""

import dataclasses
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm.config import CompilationMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import get_mp_context, set_env_var
from vllm.v1.engine.async_llm import AsyncLLM

from cosmos_rollout.engines.vllm_starting import (
    StartReport,
    check_cache_fits,
    check_script,
    failed_start,
    refused_settings,
)

# vLLM writes these into its additional configuration, which then has to be a dictionary.
_WANT_A_DICT = frozenset({"gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend"})


def launch(arguments: dict[str, Any], *, may_fork: bool) -> AsyncLLM:
    """Start vLLM's processes and wait until they can generate.

    Args:
        arguments: of ``AsyncEngineArgs``.
        may_fork: this process may be forked for them.

    Raises:
        EngineStartError: with vLLM's own words; `EngineSettingsError` or `EngineMemoryError` where
            they say that settings or memory are the cause.
    """
    check_script(get_mp_context().get_start_method())
    if current_platform.is_cpu():
        check_cache_fits(arguments, current_platform.get_device_total_memory())
    with tempfile.TemporaryDirectory(prefix="cosmos-engine-") as folder:
        report = StartReport(Path(folder) / "error")
        if _WANT_A_DICT.isdisjoint(arguments):
            arguments = {**arguments, "additional_config": report}
        try:
            return _with_processes(AsyncEngineArgs(**arguments), may_fork=may_fork)
        except (ValueError, TypeError) as error:
            names = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
            raise refused_settings(error, names) from error
        except RuntimeError as error:
            raise failed_start(str(error), report.read(), arguments) from error


def _with_processes(arguments: AsyncEngineArgs, *, may_fork: bool) -> AsyncLLM:
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    with ExitStack() as chosen:
        if may_fork and current_platform.is_cpu():
            # what making a configuration for CPUs sets to "spawn", whatever it was
            chosen.enter_context(set_env_var("VLLM_WORKER_MULTIPROC_METHOD", "fork"))
        if current_platform.is_cpu() and config.compilation_config.mode != CompilationMode.NONE:
            # what `cpu_environment` forbids: vLLM would go on uncompiled, and not say so
            chosen.enter_context(set_env_var("TORCHDYNAMO_DISABLE", "0"))
        return AsyncLLM.from_vllm_config(
            config,
            enable_log_requests=arguments.enable_log_requests,
            disable_log_stats=arguments.disable_log_stats,
        )
