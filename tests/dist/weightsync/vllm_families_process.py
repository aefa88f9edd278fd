"""One worker of vLLM without an engine around it: version B into a model that was loaded with A.

For every family that it is asked for, a tiny random checkpoint A is loaded by vLLM itself, B is
published by a sender and put into that model, and the outcome is compared bit for bit with a
fresh load of B. Commands and answers are JSON lines, as in the other scripts of this folder.
"""

import gc
import importlib.machinery
import importlib.util
import json
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.worker import cpu_model_runner

from cosmos_weightsync import WeightSender, shards_of
from cosmos_weightsync.integrations.vllm import register
from cosmos_weightsync.integrations.vllm_engine import CosmosWeightTransferEngine, InitInfo

torch.set_num_threads(1)
SETUP: dict[str, Any] = json.loads(sys.argv[1])
DENSE = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    **EXPERTS,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "qwen2.5": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),  # 64 // 2 is 32.
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 1, **EXPERTS}),
    "qwen2.5-vl": ("qwen2_5_vl", {"vision_config": VISION}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 32}),
    "moonlight": ("deepseek_v3", LATENT),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2, "tie_word_embeddings": True}),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 128, "num_local_experts": 4}),
}


def new_checkpoint(family: str, seed: int, folder: Path) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes, which rank 0 does for all, in checkpoint names."""
    kind, options = FAMILIES[family]
    if SETUP["rank"] == 0:
        torch.manual_seed(seed)
        if kind == "qwen2_5_vl":
            text = {**DENSE, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
            config = AutoConfig.for_model(kind, **text, text_config=text, **options)
            model = AutoModelForImageTextToText.from_config(config)
        else:
            config = AutoConfig.for_model(kind, **{**DENSE, **options})
            model = AutoModelForCausalLM.from_config(config)
        model.float().save_pretrained(folder)
    torch.distributed.barrier()
    return load_file(folder / "model.safetensors")


def import_without_torchvision() -> None:
    """A model of images and text imports torchvision to cut up images; nothing here sees one."""
    is_installed = importlib.util.find_spec("torchvision") is not None
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        if not is_installed:
            sys.modules[name] = module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = []
    if not is_installed:
        sys.modules["torchvision.transforms.v2"].functional = types.ModuleType("functional")


def register_here(folder: Path) -> None:
    """Have vLLM look at the model's class in this process rather than in one of its own."""
    for name in json.loads((folder / "config.json").read_text())["architectures"]:
        if "VL" in name:
            import_without_torchvision()
        known = ModelRegistry.models[name]
        if hasattr(known, "load_model_cls"):
            ModelRegistry.register_model(name, known.load_model_cls())


def build(folder: Path, *, expert_parallel: bool) -> tuple[torch.nn.Module, VllmConfig]:
    register_here(folder)
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
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
        if callable(getattr(other, "cpu_linear", None)):
            widths = ("input_size_per_partition", "input_size", "embedding_dim")
            width = next(getattr(other, name) for name in widths if hasattr(other, name))
            x = torch.linspace(-1, 1, 3 * width).reshape(3, width)
            outcomes = [module.cpu_linear(x, module.weight, None) for module in (one, other)]
            if not torch.equal(*outcomes):
                different.append(f"{path}.cpu_linear")
    return different


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors that are neither."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    own.update(module.named_parameters(recurse=False, remove_duplicate=False))
    own.update(module.named_buffers(recurse=False, remove_duplicate=False))
    return own


def check(family: str, *, expert_parallel: bool = False, part: str = "") -> dict[str, Any]:
    """Load A, send B (or only those tensors of B that have ``part`` in their names)."""
    folder = Path(SETUP["folder"]) / f"{family}{part}"
    old = new_checkpoint(family, 0, folder / "a")
    tensors = new_checkpoint(family, 1, folder / "b")
    if part:
        tensors = {name: tensor for name, tensor in tensors.items() if part in name}
        save_file({**old, **tensors}, folder / "b" / "model.safetensors", {"format": "pt"})
    model, config = build(folder / "a", expert_parallel=expert_parallel)
    fresh, _ = build(folder / "b", expert_parallel=expert_parallel)
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


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    cpu_model_runner._set_torch_accelerator_to_noop()
    register()
    rank, world_size = SETUP["rank"], SETUP["world_size"]
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
        family, _ = command.pop("family"), command.pop("do")
        try:
            reply(check(family, **command))
        except Exception as error:  # noqa: BLE001 - the test shows it
            traceback.print_exc()
            reply({"family": family, "error": f"{type(error).__name__}: {error}"})
        gc.collect()


if __name__ == "__main__":
    main()
