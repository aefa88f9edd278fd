"""The examples with a vLLM in them run as they stand, and end in tokens of the new weights."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest
import torch
from forked_scripts import ENGINES, TRAINERS, Forked, warm

import cosmos_weightsync

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # The engine's start is in it.

_PACKAGE = Path(cosmos_weightsync.__file__).parents[2]
_SMALL_AND_ALONE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_SIZES = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
_PROMPT = [1, 2, 3]
_NUM_TOKENS = 16
"""What ``SamplingParams`` asks for by itself."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    """Two models of one shape; token 7 is the word "7"."""
    words = tokenizers.models.WordLevel({str(i): i for i in range(250)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model("qwen3", **_SIZES)
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
        fast.save_pretrained(folder)
    return folders


def load(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def answer_of(model: torch.nn.Module) -> list[int]:
    """What the model says after the prompt, whole logits anew for each token."""
    tokens = torch.tensor([_PROMPT])
    for _ in range(_NUM_TOKENS):
        following = model(tokens).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens[0, len(_PROMPT) :].tolist()


@contextlib.contextmanager
def started(*command: object, modules: Sequence[str] = TRAINERS, **where: Any) -> Iterator[Forked]:
    """A process that ends with the block, and those that it started."""
    process = Forked(command, warm(modules, _SMALL_AND_ALONE), **where)
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its workers, which have process groups of their own.
        with contextlib.suppress(TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.wait(10)


def served(script: str, *arguments: object, **where: Any) -> str:
    """What an example with a vLLM says to its end, which is a good one."""
    with started(_PACKAGE / "examples" / script, *arguments, modules=ENGINES, **where) as engine:
        output, _ = engine.communicate(timeout=500)
        assert engine.wait(10) == 0
    return output


def answers(output: str) -> list[list[int]]:
    """The lines that are nothing but numbers."""
    lines = [line.split() for line in output.splitlines()]
    return [[int(word) for word in line] for line in lines if line and all(map(str.isdigit, line))]


def test_an_fsdp_trainer_feeds_a_plain_vllm(checkpoints):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with started(*command, _PACKAGE / "examples" / "train_fsdp.py", checkpoints[0]) as trainers:
        output = served("serve_vllm.py", checkpoints[0], stdin=trainers.stdout.fileno())
    model = load(checkpoints[0])
    before = answer_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = torch.arange(32).reshape(2, 16)
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert answers(output) == [answer_of(model)]
    assert before != answer_of(model)


def test_a_running_vllm_goes_from_one_checkpoint_to_another(checkpoints):
    output = served("checkpoint_to_vllm.py", *checkpoints)
    assert answers(output) == [answer_of(load(folder)) for folder in checkpoints]


def test_a_trainer_with_an_adapter_feeds_a_plain_vllm(checkpoints, tmp_path):
    pytest.importorskip("peft")
    text = (_PACKAGE / "examples" / "train_lora.py").read_text()
    save = "model.merge_and_unload().save_pretrained(sys.argv[2])\n"
    save += "open(sys.argv[2] + '.whole', 'w').close()\nsignal.pause()"
    script, merged = tmp_path / "train.py", tmp_path / "merged"
    script.write_text(text.replace("signal.pause()", save))
    with started(script, checkpoints[0], merged, directory=tmp_path) as trainer:
        output = served("serve_vllm.py", checkpoints[0], stdin=trainer.stdout.fileno())
        end = time.monotonic() + 60
        while not merged.with_suffix(".whole").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
    assert answers(output) == [answer_of(load(merged))]
    assert answers(output) != [answer_of(load(checkpoints[0]))]


@pytest.mark.parametrize(
    "name", ["train_fsdp.py", "train_lora.py", "serve_vllm.py", "checkpoint_to_vllm.py"]
)
def test_each_example_is_short_and_in_the_readme(name):
    code = (_PACKAGE / "examples" / name).read_text().partition('"""\n\n')[2]
    assert len([line for line in code.splitlines() if line and "import" not in line]) < 20
    assert code in (_PACKAGE / "README.md").read_text()
