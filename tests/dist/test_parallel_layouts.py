"""Every data-parallel layout takes the step that one process takes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RANKS = Path(__file__).with_name("parallel_ranks.py")
# replicas, ranks in each, of which replicated (HSDP)
LAYOUTS = {
    "one": (1, 1, 1),
    "two_ranks": (1, 2, 1),
    "two_replicas": (2, 1, 1),
    "two_by_two": (2, 2, 1),
    "hsdp": (1, 4, 2),
    "replicated": (1, 2, 2),
    "three_ranks": (1, 3, 1),
}


def run_ranks(scenario: str, directory: Path, timeout_s: float = 200) -> None:
    process = subprocess.Popen(
        [sys.executable, str(RANKS), scenario, str(directory)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output


def build_model(kind: str, path: Path, *, tied: bool) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "attention_dropout": 0.1,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("layouts")
    build_model("Qwen3", directory / "qwen3", tied=True)
    build_model("Llama", directory / "llama", tied=False)
    cases = [
        {"name": name, "model": str(directory / "qwen3"), "layout": layout, "checkpointing": "none"}
        for name, layout in LAYOUTS.items()
    ]
    for name, layout, checkpointing in [
        ("llama_one", "one", "none"),
        ("llama_two_ranks", "two_ranks", "none"),
        ("llama_two_ranks_recomputed", "two_ranks", "full"),
    ]:
        cases.append(
            {
                "name": name,
                "model": str(directory / "llama"),
                "layout": LAYOUTS[layout],
                "checkpointing": checkpointing,
            }
        )
    (directory / "cases.json").write_text(json.dumps(cases))
    run_ranks("layouts", directory)
    return {
        file.stem.rpartition("-")[0]: torch.load(file) for file in sorted(directory.glob("*-0.pt"))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reference"),
    [(name, "one") for name in LAYOUTS if name != "one"]
    + [("llama_two_ranks", "llama_one"), ("llama_two_ranks_recomputed", "llama_one")],
)
def test_layout_takes_the_steps_of_one_process(results, name, reference):
    for step, (mine, theirs) in enumerate(
        zip(results[name]["reports"], results[reference]["reports"], strict=True)
    ):
        assert mine["outcome"] == theirs["outcome"] == "updated"
        assert mine["weight"] == theirs["weight"]
        assert mine["metrics"] == theirs["metrics"] == {"rows": 10.0}
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6), step
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5), step
    for key, value in results[reference]["weights"].items():
        torch.testing.assert_close(results[name]["weights"][key], value, rtol=0, atol=1e-5)
