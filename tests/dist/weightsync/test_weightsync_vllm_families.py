"""No table of models: every family by the same code, bit for bit what vLLM itself would load.

One or two workers of tensor parallelism, without an engine around them; see
``vllm_families_process.py``. A vLLM that is not installed can be tested by its Python files alone,
without experts, whose operators on CPU are compiled: unpack its wheel into DIR, write ``+cpu``
behind the version in its METADATA, and

    pytest tests/dist/weightsync/test_weightsync_vllm_families.py --weightsync-vllm DIR
        -k "one_worker_holds and (llama or mistral or qwen3-tied or gemma or phi3)"
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from with_amx import WITH_AMX

pytest.importorskip("vllm")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # Importing vLLM is in it.

ONE_WORKER = [
    *("llama2", "llama3", "qwen2.5", "qwen3", "qwen3-tied", "qwen3-moe", "qwen2.5-vl"),
    *("deepseek-v3", "moonlight", "mistral", "gemma", "gemma2", "gemma3", "phi2", "phi3"),
    *("gpt-oss", "qwen3.5", "qwen3.5-moe", "muse-glimmer", "kimi-2.5"),
]
# Processors with AMX pack small matrices, experts and latent attention in bfloat16 alone.
HALF = ["qwen2.5", "qwen3-moe", "deepseek-v3"]
# Split heads, one key/value head for two workers, fused checkpoints, latent attention, experts.
TWO_WORKERS = ["llama3", "llama-one-kv-head", "phi3", "qwen3-moe", "deepseek-v3", "gpt-oss"]
# Two experts of three matrices that the other worker has: in two layers, in one (the first of
# DeepSeek's has none), or none to be left alone, as GPT-OSS keeps all experts in one tensor.
WHOLE_EXPERTS = {"qwen3-moe": 12, "deepseek-v3": 6, "gpt-oss": 0}


@dataclass
class Workers:
    """The processes of one tensor-parallel group."""

    ranks: list[Any]

    def check(self, family: str, **options: Any) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.tell("check", family=family, **options)
        return [rank.answer() for rank in self.ranks]


def start_workers(start, folder: Path, world_size: int) -> Workers:
    setup = {"world_size": world_size, "folder": str(folder), "store": str(folder / "store")}
    ranks = [
        start("vllm_families_process.py", {**setup, "rank": rank}) for rank in range(world_size)
    ]
    for rank in ranks:
        rank.answer(560)
    return Workers(ranks)


@pytest.fixture(scope="module")
def one_worker(start, tmp_path_factory) -> Workers:
    return start_workers(start, tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two_workers(start, tmp_path_factory) -> Workers:
    return start_workers(start, tmp_path_factory.mktemp("two"), 2)


def check_exact(answer: dict[str, Any]) -> None:
    assert "error" not in answer, json.dumps(answer)
    assert answer["num_different_before"] > 0  # A and B do differ.
    assert answer["different"] == []
    assert answer["unused"] == []


@pytest.mark.parametrize("family", ONE_WORKER)
def test_one_worker_holds_what_a_fresh_load_holds(one_worker, family):
    (answer,) = one_worker.check(family)
    check_exact(answer)
    assert answer["whole"] == {}  # Every tensor was followed.
    assert answer["num_bytes"] == answer["all_bytes"]


@pytest.mark.parametrize("family", HALF)
def test_one_worker_holds_it_in_bfloat16(one_worker, family):
    (answer,) = one_worker.check(family, dtype="bfloat16")
    check_exact(answer)
    assert answer["whole"] == {}


@pytest.mark.parametrize("family", TWO_WORKERS)
def test_two_workers_hold_their_halves(two_workers, family):
    answers = two_workers.check(family)
    for answer in answers:
        check_exact(answer)
        # Norms, routers, latent down-projections and a lone key/value head are in both.
        assert answer["num_bytes"] < 0.65 * answer["all_bytes"]
    assert sum(answer["num_bytes"] for answer in answers) >= answers[0]["all_bytes"]
    # GPT-OSS adds the bias of a down-projection on one worker; its loader zeroes it on the other.
    zeroed = [f"model.layers.{layer}.mlp.experts.down_proj_bias" for layer in range(2)]
    expected = [[], zeroed if family == "gpt-oss" else []]
    assert [sorted(answer["whole"]) for answer in answers] == expected


@WITH_AMX
@pytest.mark.parametrize("family", ["llama3", "qwen3-moe", "deepseek-v3"])
def test_two_workers_hold_their_halves_of_blocks_of_fp8(two_workers, family):
    """A block's scale goes where the block goes; both workers need one that they share."""
    for answer in two_workers.check(f"{family}-of-blocks", dtype="bfloat16"):
        check_exact(answer)
        assert answer["num_bytes"] < 0.65 * answer["all_bytes"]
        assert answer["whole"] == {}


@pytest.mark.parametrize(("family", "num_unused"), WHOLE_EXPERTS.items())
def test_expert_parallel_workers_fetch_their_experts_only(two_workers, family, num_unused):
    answers = two_workers.check(family, expert_parallel=True)
    for answer in answers:
        assert "error" not in answer, json.dumps(answer)
        assert answer["different"] == []
        assert answer["num_bytes"] < 0.65 * answer["all_bytes"]
        assert all(".experts." in name for name in answer["unused"])
    assert [len(answer["unused"]) for answer in answers] == [num_unused] * 2


def test_what_cannot_be_followed_goes_through_the_engines_loader(one_worker):
    """BLOOM keeps q, k and v of a head together, and its loader reshapes them by a copy."""
    (answer,) = one_worker.check("bloom")
    assert "error" not in answer, json.dumps(answer)
    assert answer["different"] == []
    assert set(answer["whole"]) == {
        f"transformer.h.{layer}.self_attention.query_key_value.{kind}"
        for layer in range(2)
        for kind in ("weight", "bias")
    }
    assert set(answer["whole"].values()) == {"reshape cannot be recorded"}


@pytest.mark.parametrize("family", ["qwen3-moe"])
def test_a_worker_fetches_only_what_changed(one_worker, family):
    (rank,) = one_worker.ranks
    answer = rank.ask("check_reuse", family=family)
    assert "error" not in answer, json.dumps(answer)
    assert answer["different"] == []
    assert 0 < answer["part"] < answer["whole"] / 5


@pytest.mark.parametrize(
    ("family", "part", "num_tensors"),
    [("qwen3", "layers.1.", 11), ("deepseek-v3", "layers.1.mlp.", 17)],
)
def test_modules_to_which_nothing_is_sent_can_be_kept(one_worker, family, part, num_tensors):
    (answer,) = one_worker.check(family, part=part)
    assert "error" not in answer, json.dumps(answer)
    assert answer["num_different_before"] > 0
    assert answer["different"] == []
    assert answer["num_tensors"] == num_tensors
