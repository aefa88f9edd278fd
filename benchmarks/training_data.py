"""What every arm of the training benchmark starts from: one model and one step's samples on disk.

Imports torch and transformers alone, so that the baseline's environment can run it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The work of an arm.

    Attributes:
        vocabulary: tokens.
        hidden: width.
        layers: decoder layers.
        prompts: prompts in a step.
        samples: samples of each prompt.
        shortest: response, in tokens.
        longest: response, in tokens; lengths in between are drawn log-uniformly.
        rows: samples in a micro-batch of the arms that pad.
        tokens: in a micro-batch of the arms that pack: rows times the longest sample.
        steps: measured optimizer steps, after one that is not.
    """

    vocabulary: int = 4096
    hidden: int = 192
    layers: int = 3
    prompts: int = 8
    samples: int = 4
    shortest: int = 8
    longest: int = 240
    rows: int = 8
    tokens: int = 2048
    steps: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one run of one arm found.

    Attributes:
        cpu_s: of each measured step.
        loss: of the first step.
        grad_norm: of the first step.
        tokens: trained tokens of a step.
        overhead_s: CPU seconds of planning, packing and normalising in each step, where measured.
        useful: share of the places of a pass that held a token, where measured.
    """

    cpu_s: tuple[float, ...]
    loss: float
    grad_norm: float
    tokens: int
    overhead_s: tuple[float, ...] = ()
    useful: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample.

    Attributes:
        prompt: token ids.
        response: token ids.
        reward: of the response.
    """

    prompt: list[int]
    response: list[int]
    reward: float


def make(directory: Path, sizes: Sizes) -> None:
    """Write the model, a tokenizer of numbers, and the samples of the step."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 32,
        num_key_value_heads=sizes.hidden // 64,
        head_dim=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory / "model")
    names = ["<pad>", "<s>", "</s>", *map(str, range(3, sizes.vocabulary))]
    inner = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory / "model")
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    for _ in range(sizes.prompts):
        prompt = rng.integers(3, sizes.vocabulary, rng.integers(4, 17)).tolist()
        low, high = np.log([sizes.shortest, sizes.longest])
        for length in np.exp(rng.uniform(low, high, sizes.samples)).astype(int):
            response = [*rng.integers(3, sizes.vocabulary, length - 1).tolist(), 2]
            samples.append(Sample(prompt=prompt, response=response, reward=float(rng.random())))
    (directory / "samples.json").write_text(json.dumps([asdict(s) for s in samples]))
    (directory / "sizes.json").write_text(json.dumps(asdict(sizes)))


def read(directory: Path) -> tuple[Sizes, list[Sample]]:
    """Return what `make` wrote."""
    sizes = Sizes(**json.loads((directory / "sizes.json").read_text()))
    return sizes, [Sample(**s) for s in json.loads((directory / "samples.json").read_text())]
