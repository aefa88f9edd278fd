"""One worker of vLLM without an engine around it: version B into a model that was loaded with A.

For every family that it is asked for, a tiny random checkpoint A is loaded by vLLM itself, B is
published by a sender and put into that model, and the outcome is compared bit for bit with a
fresh load of B. Commands and answers are JSON lines, as in the other scripts of this folder.
"""

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker import cpu_model_runner
from vllm_families import dtype_of, register_here, write_checkpoint
from vllm_quantised import write_quantised

from cosmos_weightsync import WeightSender, shards_of
from cosmos_weightsync.integrations.vllm import register
from cosmos_weightsync.integrations.vllm_engine import CosmosWeightTransferEngine
from cosmos_weightsync.integrations.vllm_infos import InitInfo

torch.set_num_threads(1)
SETUP: dict[str, Any] = json.loads(sys.argv[1])


def new_checkpoint(family: str, seed: int, folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint that rank 0 writes for all; in FP8 of a family that has blocks for it."""
    if SETUP["rank"] == 0 and family.endswith("-of-blocks"):
        plain = folder.with_name(f"{folder.name}-plain")
        write_checkpoint(family, seed, plain)
        write_quantised("fp8-block", plain, folder)
    elif SETUP["rank"] == 0:
        write_checkpoint(family, seed, folder)
    torch.distributed.barrier()
    return load_file(folder / "model.safetensors")


def build(
    folder: Path, *, dtype: str = "float32", expert_parallel: bool = False
) -> tuple[torch.nn.Module, VllmConfig]:
    register_here(folder)
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=16 << 20,
        tensor_parallel_size=SETUP["world_size"],
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="external_launcher",
    ).create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def differences(found: torch.nn.Module, wanted: torch.nn.Module) -> list[str]:
    """Everything that the two models would compute with and that is not the same bits."""
    different: list[str] = []
    for (path, one), (_, other) in zip(
        found.named_modules(remove_duplicate=False),
        wanted.named_modules(remove_duplicate=False),
        strict=True,
    ):
        for name, value in tensors_of(other).items():
            mine = tensors_of(one).get(name)
            if mine is None or not torch.equal(mine, value):
                different.append(f"{path}.{name}")
        is_called = not getattr(other, "_cpu_skip_gemm_dispatch", False)
        if is_called and callable(getattr(other, "cpu_linear", None)):
            widths = ("input_size_per_partition", "input_size", "embedding_dim")
            width = next(getattr(other, name) for name in widths if hasattr(other, name))
            x = torch.linspace(-1, 1, 3 * width).reshape(3, width)
            x = x.to(getattr(other, "params_dtype", torch.float32))
            outcomes = [module.cpu_linear(x, module.weight, None) for module in (one, other)]
            if not torch.equal(*outcomes):
                different.append(f"{path}.cpu_linear")
    return different


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors that are neither, those of attention's kernels too."""
    plain = {**vars(module), **vars(getattr(module, "impl", object))}
    own = {name: value for name, value in plain.items() if isinstance(value, torch.Tensor)}
    own.update(module.named_parameters(recurse=False, remove_duplicate=False))
    own.update(module.named_buffers(recurse=False, remove_duplicate=False))
    return own


def check(
    family: str, *, dtype: str = "", expert_parallel: bool = False, part: str = ""
) -> dict[str, Any]:
    """Load A, send B (or only those tensors of B that have ``part`` in their names)."""
    folder = Path(SETUP["folder"]) / f"{family}{part}{dtype}"
    how = {"dtype": dtype or dtype_of(family), "expert_parallel": expert_parallel}
    old = new_checkpoint(family, 0, folder / "a")
    tensors = new_checkpoint(family, 1, folder / "b")
    if part:
        tensors = {name: tensor for name, tensor in tensors.items() if part in name}
        save_file({**old, **tensors}, folder / "b" / "model.safetensors", {"format": "pt"})
    model, config = build(folder / "a", **how)
    fresh, _ = build(folder / "b", **how)
    before = differences(model, fresh)
    engine = CosmosWeightTransferEngine(
        WeightTransferConfig(backend="cosmos"), config, torch.device("cpu"), model
    )
    with WeightSender(shards_of(tensors.items()), rank=0, num_ranks=1) as sender:
        sender.publish(1)
        missing = "keep" if part else "refuse"
        engine.init_transfer_engine(InitInfo(endpoints=[sender.endpoint], missing=missing))
        with set_current_vllm_config(config):
            engine.start_weight_update()
            engine.update_weights({"version": 1})
            engine.finish_weight_update()
        layout = engine.layout
        engine.shutdown()
    return {
        "family": family,
        "num_different_before": len(before),
        "different": differences(model, fresh),
        "num_tensors": len(tensors),
        "num_bytes": layout.num_bytes,
        "all_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "num_boxes": len(layout.specs),
        "whole": dict(layout.whole),
        "unused": list(layout.unused),
    }


def check_reuse(family: str) -> dict[str, Any]:
    """Load A, send A, change one element in 50, send what changed; what crossed for each."""
    folder = Path(SETUP["folder"]) / f"{family}-reuse"
    tensors = new_checkpoint(family, 0, folder / "a")
    (folder / "b").mkdir()
    (folder / "b" / "config.json").write_text((folder / "a" / "config.json").read_text())
    model, config = build(folder / "a")
    engine = CosmosWeightTransferEngine(
        WeightTransferConfig(backend="cosmos"), config, torch.device("cpu"), model
    )
    crossed: list[int] = []
    with WeightSender(shards_of(tensors.items()), rank=0, num_ranks=1) as sender:
        for version in (1, 2):
            sender.publish(version)
            if version == 1:
                where = InitInfo(endpoints=[sender.endpoint], transport="tcp", reuse="changes")
                engine.init_transfer_engine(where)
            engine.begin_stage(version, 60.0)
            while engine.stage_state()["state"] == "running":
                time.sleep(0.01)
            crossed.append(engine.stage_state()["wire_bytes"])
            with set_current_vllm_config(config):
                engine.update_weights({"version": version})
            for tensor in tensors.values():
                tensor.view(-1)[:: 50 if version == 1 else tensor.numel()] += 0.5
            if version == 1:
                save_file(tensors, folder / "b" / "model.safetensors", {"format": "pt"})
        engine.shutdown()
    fresh, _ = build(folder / "b")
    different = differences(model, fresh)
    return {"family": family, "different": different, "whole": crossed[0], "part": crossed[1]}


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    cpu_model_runner._set_torch_accelerator_to_noop()
    register()
    rank, world_size = SETUP["rank"], SETUP["world_size"]
    # what a worker of vLLM sets: by it ranks on processors with AVX-512 find their shared memory
    os.environ["VLLM_DIST_IDENT"] = f"families-{os.getppid()}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size,
            rank,
            distributed_init_method=f"file://{SETUP['store']}",
            local_rank=rank,
            backend="gloo",
        )
        initialize_model_parallel(world_size, 1)
    reply({})
    for line in sys.stdin:
        command = json.loads(line)
        family, do = command.pop("family"), command.pop("do")
        try:
            reply(check_reuse(family) if do == "check_reuse" else check(family, **command))
        except Exception as error:  # noqa: BLE001 - the test shows it
            traceback.print_exc()
            reply({"family": family, "error": f"{type(error).__name__}: {error}"})
        gc.collect()


if __name__ == "__main__":
    main()
