"""FSDP2 on two ranks to a real vLLM that generates meanwhile, token for token against transformers.

Tied embeddings and mixtures of experts are here because vLLM's own reload on CPU leaves their old
weights in place without a word.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_weightsync import Layout, WeightSender, plan_transfer, shards_of

pytest.importorskip("vllm")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # The engine's start is in it.

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {**SIZES, "tie_word_embeddings": False}),
    "tied": ("qwen3", {**SIZES, "tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {**SIZES, **EXPERTS, "tie_word_embeddings": False}),
    "two workers": ("qwen3", {**SIZES, "tie_word_embeddings": False}),
}
PROMPTS = [[10 + i, 20 + i, 30, 40 + i] for i in range(3)]
TOLERANCE = 1e-3


@dataclass
class Setup:
    trainer: Any
    engine: Any
    kind: str
    folder: Path
    version: int = 0

    def publish(self, scale: float = 0.05, stride: int = 1) -> None:
        """A new version, and what torch says it is, for the reference."""
        self.prepare(scale, stride)
        self.publish_prepared()

    def prepare(self, scale: float = 0.05, stride: int = 1) -> None:
        """Have a version that is ready: on a busy machine answers end while trainers make one."""
        self.version += 1
        self.trainer.ask("step", scale=scale, stride=stride)
        self.trainer.ask("save", path=str(self.folder / f"{self.version}.pt"))

    def publish_prepared(self) -> None:
        self.trainer.ask("publish", version=self.version)

    def reference(self, version: int) -> torch.nn.Module:
        model = new_model(self.kind)
        missing = model.load_state_dict(torch.load(self.folder / f"{version}.pt"), strict=False)
        assert not missing.unexpected_keys
        assert set(missing.missing_keys) <= {"lm_head.weight"}
        return model


def new_model(kind: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, options = MODELS[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).float().eval()


@pytest.fixture(scope="module", params=sorted(MODELS))
def setup(request, start, start_trainer, tmp_path_factory) -> Setup:
    kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    new_model(kind).save_pretrained(folder / "model")
    trainer = start_trainer(2, *MODELS[kind])
    num_workers = 2 if kind == "two workers" else 1
    engine = start("vllm_process.py", {"model": str(folder / "model"), "num_workers": num_workers})
    engine.answer(560)
    return Setup(trainer, engine, kind, folder)


@torch.no_grad()
def logprobs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)


def check(setup: Setup, sample: dict[str, Any]) -> list[int]:
    """Every token's log-prob is that of the version its span names; returns those versions."""
    ids = sample["prompt"] + sample["tokens"]
    assert sample["spans"][0][1] == 0
    assert sample["spans"][-1][2] == len(sample["tokens"])
    versions = [int(version) for version, _, _ in sample["spans"]]
    for version, start, stop in sample["spans"]:
        table = logprobs(setup.reference(int(version)), ids)
        for index in range(start, stop):
            position = len(sample["prompt"]) + index - 1
            wanted = table[position, sample["tokens"][index]].item()
            assert abs(sample["logprobs"][index] - wanted) < TOLERANCE, (version, index)
    return versions


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_tokens_are_those_of_the_version_they_name(setup, transport):
    setup.publish()
    old = setup.version
    setup.engine.ask("connect", endpoints=setup.trainer.endpoints, transport=transport)
    assert setup.engine.ask("load", version=old)["version"] == old

    # Staging begins before the next version is published: generation goes on until it is.
    setup.prepare()
    setup.engine.tell("load_while_generating", version=old + 1, prompts=PROMPTS)
    assert setup.engine.answer()["tokens_while_staging"] == 15
    setup.publish_prepared()
    answer = setup.engine.answer()
    assert answer["version"] == old + 1
    for sample in answer["samples"]:
        assert check(setup, sample) == [old, old + 1]
    fresh = setup.engine.ask("generate", prompt=PROMPTS[0], num_tokens=30)
    assert check(setup, fresh) == [old + 1]


def test_what_an_engine_fetches_can_be_planned_and_is_what_it_fetches(setup):
    setup.publish()
    setup.engine.ask("connect", endpoints=setup.trainer.endpoints, transport="tcp")
    layout = Layout.from_json(setup.engine.ask("layout"))
    assert layout.num_ranks == (2 if setup.kind == "two workers" else 1)
    plan = plan_transfer(Layout.from_ranks([layout.full_specs()]), layout)
    loaded = setup.engine.ask("load", version=setup.version)["num_bytes"]
    assert plan.stats().max_receiver_bytes == loaded
    query = "model.layers.1.self_attn.q_proj.weight"
    rows = [
        [
            (spec.box.start[0], spec.box.stop[0])
            for spec in layout.specs_of(rank)
            if spec.name == query
        ]
        for rank in range(layout.num_ranks)
    ]
    assert rows == ([[(0, 32)], [(32, 64)]] if setup.kind == "two workers" else [[(0, 64)]])


def test_a_worker_receives_only_what_it_uses(setup):
    """All of the checkpoint in one worker; half of it in two, save norms and the single KV head."""
    setup.publish()
    setup.engine.ask("connect", endpoints=setup.trainer.endpoints, transport="tcp")
    found = setup.engine.ask("load", version=setup.version)["num_bytes"]
    state = setup.reference(setup.version).state_dict()
    whole = sum(value.nbytes for name, value in state.items() if not is_tied(setup, name))
    if setup.kind != "two workers":
        assert found == whole
        return
    replicated = sum(
        value.nbytes
        for name, value in state.items()
        if value.dim() == 1 or "k_proj" in name or "v_proj" in name
    )
    assert found == (whole + replicated) // 2


def is_tied(setup: Setup, name: str) -> bool:
    return setup.kind == "tied" and name == "lm_head.weight"


def test_tensors_that_do_not_fit_are_refused_by_name_and_the_engine_serves_on(setup):
    setup.publish()
    setup.engine.ask("connect", endpoints=setup.trainer.endpoints, transport="tcp")
    assert setup.engine.ask("load", version=setup.version)["version"] == setup.version
    tensors = new_model(setup.kind).state_dict()
    stray = {**tensors, "model.layers.0.mlp.stranger.weight": torch.zeros(3)}
    for wrong, name in [
        (stray, "stranger"),
        (without(tensors, "layers.1.input"), "layers.1.input"),
    ]:
        with WeightSender(shards_of(wrong.items()), rank=0, num_ranks=1) as sender:
            answer = setup.engine.ask("connect", endpoints=[sender.endpoint], transport="tcp")
        assert answer["error"] == "UnknownTensorError"
        assert name in answer["message"]
        fresh = setup.engine.ask("generate", prompt=PROMPTS[1], num_tokens=20)
        assert check(setup, fresh) == [setup.version]


def without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if part not in name}


def test_a_failed_staging_leaves_the_engine_serving_what_it_had(setup):
    setup.publish()
    setup.engine.ask("connect", endpoints=setup.trainer.endpoints, transport="tcp")
    assert setup.engine.ask("load", version=setup.version)["version"] == setup.version
    answer = setup.engine.ask("connect", endpoints=["127.0.0.1:9"], transport="tcp")
    assert answer["error"] == "PeerLostError"
    assert "127.0.0.1:9" in answer["message"]
    fresh = setup.engine.ask("generate", prompt=PROMPTS[1], num_tokens=20)
    assert check(setup, fresh) == [setup.version]
    setup.publish()
    setup.engine.ask("connect", endpoints=setup.trainer.endpoints, transport="tcp")
    assert setup.engine.ask("load", version=setup.version)["version"] == setup.version


def test_an_engine_fetches_only_what_changed_if_it_is_told_so(setup):
    setup.publish()
    where = {"endpoints": setup.trainer.endpoints, "transport": "tcp"}
    answer = setup.engine.ask("connect", **where, reuse="everything")
    assert answer["error"] == "ConfigurationError"
    setup.engine.ask("connect", **where, reuse="changes")
    whole = setup.engine.ask("load", version=setup.version)
    assert whole["wire_bytes"] == whole["num_bytes"]
    setup.publish(scale=0.5, stride=50)  # One element in 50.
    part = setup.engine.ask("load", version=setup.version)
    assert part["version"] == setup.version
    assert 0 < part["wire_bytes"] < whole["wire_bytes"] / 5
    fresh = setup.engine.ask("generate", prompt=PROMPTS[1], num_tokens=20)
    assert check(setup, fresh) == [setup.version]
    setup.publish(scale=0.0)
    same = setup.engine.ask("load", version=setup.version)
    assert (same["version"], same["wire_bytes"]) == (setup.version, 0)


def test_kept_keys_and_values_are_those_of_the_old_version(setup):
    """With ``kv_cache="keep"`` the new weights attend to what the old weights computed."""
    from transformers import DynamicCache

    setup.publish()
    old = setup.version
    setup.engine.ask("connect", endpoints=setup.trainer.endpoints, transport="tcp", kv_cache="keep")
    setup.engine.ask("load", version=old)
    setup.prepare()
    setup.engine.tell("load_while_generating", version=old + 1, prompts=PROMPTS[:1])
    setup.engine.answer()
    setup.publish_prepared()
    (sample,) = setup.engine.answer()["samples"]
    (_, _, cut), (_, _, end) = sample["spans"]
    ids = torch.tensor([sample["prompt"] + sample["tokens"]])
    kept = len(sample["prompt"]) + cut - 1  # All but the token sampled last.
    before, after = setup.reference(old), setup.reference(old + 1)
    cache = DynamicCache(config=before.config)
    with torch.no_grad():
        before(ids[:, :kept], past_key_values=cache)
        table = torch.log_softmax(after(ids[:, kept:], past_key_values=cache).logits[0], -1)
    for index in range(cut, end):
        wanted = table[index - cut, sample["tokens"][index]].item()
        assert abs(sample["logprobs"][index] - wanted) < TOLERANCE, index


def test_a_restarted_trainer_is_connected_to_anew(setup, start_trainer):
    setup.trainer.tell("step", scale=0.0)  # Answered or not: it is killed.
    for rank in setup.trainer.ranks:
        rank.kill()
    time.sleep(0.1)
    setup.trainer = start_trainer(2, *MODELS[setup.kind])
    setup.version = 100
    setup.publish()
    setup.engine.ask("connect", endpoints=setup.trainer.endpoints, transport="tcp")
    assert setup.engine.ask("load", version=101)["version"] == 101
    fresh = setup.engine.ask("generate", prompt=PROMPTS[2], num_tokens=20)
    assert check(setup, fresh) == [101]
