"""Steps of torchtitan's own trainer on a model that lies in Hugging Face form."""

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer
from training_titan_data import (
    BETAS,
    LR,
    MEETING,
    WARM_STEPS,
    WEIGHT_DECAY,
    Result,
    Work,
    device_type,
    finished,
    model_in,
    tokens_of,
)

from cosmos_parallel.native.families import decoder_config, names_of
from cosmos_parallel.native.names import HfNames
from cosmos_parallel.titan import prepare


class NoTokenizer(BaseTokenizer):
    """The rows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class NoData(BaseDataLoader):
    """Batches are handed to the steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to set."""

    def __init__(self, config: Config, **_: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Host:
    """What torchtitan's trainer asks of a device, for a CPU, which has nothing to tell."""

    total_memory = 1 << 30

    def __getattr__(self, name: str) -> Any:
        """Answer any question."""
        answers: dict[str, Any] = {
            "get_device_name": "cpu",
            "get_device_properties": self,
            "memory_stats": {},
        }

        def answer(*_: Any) -> Any:
            return answers.get(name, 0)

        return answer


def run(directory: Path, work: Work, rank: int) -> Result:
    """Take the steps; one process of ``work.ranks`` calls."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(work.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(MEETING)}
    if device_type() == "cpu":
        _compute_on_the_host()
    trainer = _trainer(directory, work)
    first: list[float] = []

    def note(step: int, loss: float, largest: float, grad_norm: float, **_: Any) -> None:
        del step, largest
        first.extend((loss, grad_norm))

    trainer.metrics_processor.log = note
    rows = trainer.batch_generator(_batches(work, rank))
    seconds = []
    for _ in range(WARM_STEPS + work.steps):
        started = finished()
        trainer.step += 1
        trainer.train_step(rows)
        seconds.append(finished() - started)
    flops = float(trainer.metrics_processor.num_flops_per_token)
    torch.distributed.destroy_process_group()
    return Result(
        seconds=seconds[WARM_STEPS:], loss=first[0], grad_norm=first[1], flops_per_token=flops
    )


def _compute_on_the_host() -> None:
    """Tell those of torchtitan's modules that took an accelerator for granted at import."""
    prepare("cpu")
    names = {
        "device_module": Host(),
        "device_type": "cpu",
        "get_local_device": lambda: torch.device("cpu"),
    }
    for module in ("tools.utils", "components.metrics", "distributed.utils"):
        vars(importlib.import_module(f"torchtitan.{module}")).update(names)


def _batches(work: Work, rank: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    for step in range(WARM_STEPS + work.steps):
        rows = tokens_of(work, step, rank)
        inputs = {"input": rows[:, :-1].contiguous()}
        if work.attention == "flex":
            inputs["positions"] = torch.arange(work.length).repeat(work.rows, 1)
        yield inputs, rows[:, 1:].contiguous()


def _trainer(directory: Path, work: Work) -> Any:
    hf_config = transformers.AutoConfig.from_pretrained(model_in(directory))
    config: Any = decoder_config(hf_config)
    kind = FlexAttention if work.attention == "flex" else ScaledDotProductAttention
    for layer in config.layers:
        layer.attention.inner_attention = kind.Config()
    for _, part, _, _ in config.traverse(Module.Config, recurse=True):
        if hasattr(part, "param_init"):
            part.param_init = {"weight": skip_param_init, "bias": skip_param_init}
    spec = ModelSpec(
        name="llama3",
        flavor=work.size,
        model=config,
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    trainer = Trainer(
        Trainer.Config(
            model_spec=spec,
            dump_folder=str(directory / "torchtitan"),
            loss=ChunkedLossWrapper.Config(
                loss_fn=CrossEntropyLoss.Config(global_vocab_size=config.vocab_size)
            ),
            metrics=MetricsProcessor.Config(log_freq=1_000_000),
            tokenizer=NoTokenizer.Config(),
            dataloader=NoData.Config(),
            optimizer=default_adamw(lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
            training=TrainingConfig(
                local_batch_size=work.rows,
                seq_len=work.length,
                steps=1_000_000,
                disable_cuda_graphs=True,
                mixed_precision_param="bfloat16" if device_type() == "cuda" else "float32",
            ),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            checkpoint=CheckpointManager.Config(enable=False),
            activation_checkpoint=None,  # pyright: ignore[reportArgumentType]
            compile=CompileConfig(enable=work.compile, components=["model"]),
        )
    )
    (model,) = trainer.model_parts
    set_model_state_dict(
        model,
        _weights(model_in(directory), names_of(hf_config, config), list(model.state_dict())),
        options=StateDictOptions(full_state_dict=True),
    )
    return trainer


def _weights(directory: Path, names: HfNames, wanted: list[str]) -> dict[str, Any]:
    """The tensors of a checkpoint, by torchtitan's names."""
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    theirs = names.to_hf({name: name for name in wanted}, leaving=frozenset())
    return {name: found[hf_name] for hf_name, name in theirs.items()}
