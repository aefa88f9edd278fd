"""vLLM serves what ranks have trained and exported, with transformers' log-probs of all tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from capabilities import needs
from process_trees import run_tree
from seeing import can_cut_pictures, seeing_environment

pytest.importorskip("vllm")

# Importing vLLM is most of the time: it does not wait for the exports, and every engine is forked
# from the process that has done it. What was imported is frozen there, as vLLM has Python's
# collector go through everything several times for an engine. The kernel that turns queries on CPUs
# takes the distance of heads for that of tokens where queries have three dimensions, as in latent
# attention, so that the form in torch's own operations is used.
SERVE = """
import gc, json, multiprocessing, os, pathlib, sys
gc.disable()
sys.path.insert(0, sys.argv[1])
import torch
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.v1.engine import core
from vllm.v1.worker import cpu_worker
# vLLM reads attributes of every module there is to find kernels, and those of llvmlite have none
sys.modules |= dict.fromkeys(("numba", "llvmlite"))
from vllm_families import register_here

from cosmos_rollout.engines.vllm_arguments import cpu_arguments

def serve(name, path, prompts):
    folder = pathlib.Path(path)
    register_here(folder)
    held = json.loads((folder.parent / "held.json").read_text())
    shown = max(len(prompt.get("images", ())) for prompt in prompts)
    # a state is computed in bfloat16 alone
    dtype = "bfloat16" if name.startswith("qwen3_5") else "float32"
    engine = LLM(
        model=path, skip_tokenizer_init=not (folder / "tokenizer.json").exists(),
        enforce_eager=True, max_num_seqs=4,
        dtype=dtype, attention_backend=cpu_arguments(folder, dtype).get("attention_backend"),
        kv_cache_memory_bytes=32 << 20, max_model_len=held["context_length"],
        logprobs_mode="raw_logprobs", max_logprobs=-1,
        limit_mm_per_prompt={"image": shown, "video": 0},
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
    )
    given = []
    for prompt in prompts:
        given.append({"prompt_token_ids": prompt["tokens"]})
        if prompt.get("images"):
            images = [Image.open(image).convert("RGB") for image in prompt["images"]]
            given[-1]["multi_modal_data"] = {"image": images}
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    tables = []
    for answer in engine.generate(given, params, use_tqdm=False):
        rows = [
            [scores[token].logprob for token in sorted(scores)]
            for scores in answer.prompt_logprobs[1:]
        ]
        tables.append(torch.tensor(rows))
    torch.save(tables, folder.parent / "served.pt")
    os._exit(0)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    gc.freeze()
    for order in json.loads(sys.stdin.read()):
        engine = context.Process(target=serve, args=order)
        engine.start()
        engine.join()
        if engine.exitcode:
            sys.exit(f"{order[0]} is not served")
"""
# who trains what: every family that is named in the README is divided between two ranks
LAYOUTS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {
    "alone": (
        1,
        {},
        (
            "deepseek_v3",
            "gpt_oss",
            "gemma2",
            "phi3",
            "qwen3_5",
            "qwen3_5_moe",
            "muse_glimmer",
            "kimi_k25",
        ),
    ),
    "pp2": (2, {"pp": 2}, ("llama-2",)),
    "tp2": (2, {"tp": 2}, ("llama-3", "qwen2")),
    "ep2": (2, {"ep": 2}, ("qwen3_moe", "moonlight")),
    "fsdp2": (2, {}, ("qwen3", "qwen2_5_vl")),
}
FAMILIES = [family for *_, families in LAYOUTS.values() for family in families]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def asked(request) -> list[str]:
    """The families whose tests run."""
    here = [item for item in request.session.items if item.path == request.path]
    found = {item.callspec.params["family"] for item in here if hasattr(item, "callspec")}
    is_shown = can_cut_pictures()
    return [name for name in FAMILIES if name in found and (is_shown or name != "qwen2_5_vl")]


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Iterator[subprocess.Popen[str]]:
    """A process that imports vLLM, and serves what it is told to then."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(HERE / "weightsync")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            **seeing_environment(),
        },
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def exported(tmp_path_factory, asked, serving) -> Path:
    """Train and export the families that are asked for."""
    directory = tmp_path_factory.mktemp("exports")
    for family in asked:
        (directory / family).mkdir()
    cases: list[dict[str, Any]] = [{"name": "originals", "num_ranks": 1, "families": asked}]
    for name, (num_ranks, degrees, all_families) in LAYOUTS.items():
        families = [family for family in all_families if family in asked]
        case = {"name": name, "num_ranks": num_ranks, "degrees": degrees, "families": families}
        cases += [case] if families else []
    given = "".join(json.dumps(case) + "\n" for case in cases)
    run_tree(HERE / "export_ranks.py", directory, deadline_s=400, given=given)
    for case in cases:
        result = json.loads((directory / f"{case['name']}.json").read_text())
        assert "error" not in result, result["error"]
    return directory


@pytest.fixture(scope="module")
def served(exported, asked, serving) -> Path:
    """Have vLLM give the log-probs of every exported model."""
    orders = [
        (
            name,
            str(exported / name / "exported"),
            torch.load(exported / name / "said.pt")["prompts"],
        )
        for name in asked
    ]
    output, _ = serving.communicate(json.dumps(orders), timeout=500)
    assert serving.returncode == 0, output[-3000:]
    return exported


needs_pictures = needs("torchvision", can_cut_pictures())
EACH = [
    pytest.param(family, marks=needs_pictures) if family == "qwen2_5_vl" else family
    for family in FAMILIES
]


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH)
def test_an_export_has_the_weights_that_ranks_have_trained(exported, family):
    layout = next(name for name, (*_, families) in LAYOUTS.items() if family in families)
    ranks, alone = json.loads((exported / f"{layout}.json").read_text())["steps"][family]
    assert ranks == pytest.approx(alone, rel=1e-4)
    said = torch.load(exported / family / "said.pt")
    for before, after in zip(said["before"], said["after"], strict=True):
        assert (after - before).abs().max() > 0.1  # a step of 0.01 that all weights have taken


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH)
def test_vllm_serves_an_export_with_transformers_log_probs_of_every_token(served, family):
    expected = torch.load(served / family / "said.pt")["after"]
    found = torch.load(served / family / "served.pt")
    # of 4 to 13, in bfloat16
    apart = 0.1 if family.startswith("qwen3_5") else 1e-4
    for mine, theirs in zip(found, expected, strict=True):
        assert len(theirs) > 64
        torch.testing.assert_close(mine, theirs[:-1], rtol=0, atol=apart)
