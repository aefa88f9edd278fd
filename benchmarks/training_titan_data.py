"""What both arms of the comparison with torchtitan's trainer share."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cosmos_parallel import SftBatch

LR = 1e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
WARM_STEPS = 3
MEETING = 29_517
SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 16}
    | {"num_key_value_heads": 16, "intermediate_size": 768, "vocab_size": 2048},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128_256},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256},
}


def result_in(printed: str) -> Any:
    """Return what an arm in a process of its own found, from its last line that says ``RESULT``."""
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1].removeprefix("RESULT "))


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What both arms do.

    Attributes:
        size: of the model.
        rows: of tokens for each rank in a step.
        length: of a row, in tokens.
        steps: that are timed.
        ranks: over which FSDP2 shards.
        attention: of torchtitan's trainer, ``flex`` or ``sdpa``.
        compile: every layer, by inductor.
    """

    size: str
    rows: int
    length: int
    steps: int
    ranks: int
    attention: str
    compile: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a run found.

    Attributes:
        seconds: of each timed step.
        loss: of the first step.
        grad_norm: of the first step.
        flops_per_token: as torchtitan counts them; 0 where it was not asked.
    """

    seconds: list[float]
    loss: float
    grad_norm: float
    flops_per_token: float = 0.0


def device_type() -> str:
    """Where both arms compute."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def tokens_of(work: Work, step: int, rank: int) -> torch.Tensor:
    """Rows of a step with one token more than they train: ``int64[rows, length + 1]``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (work.rows, work.length + 1)
    return torch.randint(0, SIZES[work.size]["vocab_size"], shape, generator=generator)


def batch_of(rows: torch.Tensor) -> SftBatch:
    """Rows of one sample each, ``int64[rows, length]``, of which all but the first is trained."""
    trainable = torch.ones_like(rows, dtype=torch.bool)
    trainable[:, 0] = False
    return SftBatch(
        token_ids=rows,
        trainable=trainable,
        position_ids=torch.arange(rows.shape[1]).repeat(len(rows), 1),
        num_tokens=rows.numel(),
    )


def finished() -> float:
    """The time when the device has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def write_model(directory: Path, size: str) -> None:
    """Write a random Llama with untied embeddings."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES[size] | {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
    config = LlamaConfig(**sizes, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(model_in(directory))


def model_in(directory: Path) -> Path:
    """Where the model of both arms lies."""
    return directory / "model"
