"""Adapters in RL: they travel alone, are added where they arrive, and load in peft."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cosmos_app.exporting import ADAPTER_FOLDER
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import Recipe, WeightSyncConfig
from cosmos_app.roles.adapters import MergedWeights, MergingClient
from cosmos_app.roles.quantised import quantised_shards
from cosmos_app.roles.run_checkpoints import RunCheckpoints
from cosmos_app.roles.step_trainer import Seat
from cosmos_app.roles.trainer import Trainer
from cosmos_app.roles.weights import ReceivedWeights
from cosmos_parallel import LoraConfig, ParallelConfig, build_mesh
from cosmos_weightsync import WeightSender, shards_of

peft = pytest.importorskip("peft")
TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=32)


@pytest.fixture
def trainer(tmp_path: Path):
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["1+1=2"], TINY, seed=0)
    recipe = Recipe()
    training = replace(recipe.model.training, lora=LoraConfig(rank=2, alpha=6.0))
    recipe = replace(recipe, model=replace(recipe.model, training=training))
    mesh = build_mesh(ParallelConfig())
    made = Trainer(
        recipe,
        tmp_path / "model",
        Seat(replica_index=0, num_replicas=1, mesh=mesh),
        RunCheckpoints(tmp_path / "checkpoints", mesh),
        None,
    )
    yield made
    made.close()


def moved(trainer: Trainer, version: int) -> None:
    """Stand in for training: give the adapter values, and publish them."""
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in trainer._learner.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    trainer._sender.publish(version)


class Inner:
    """What stands between a client and vLLM's workers: it takes whole weights of this host."""

    def __init__(self) -> None:
        self.source = ReceivedWeights(WeightSyncConfig())
        self.endpoints: tuple[str, ...] = ()
        self.staged = None
        self.cache_salt = "never"

    async def connect(self, endpoints):
        self.endpoints = tuple(endpoints)

    async def load(self, version: int):
        self.staged = self.source.stage(version, self.endpoints)
        return replace_times(self.staged.version)


def replace_times(version: int):
    from cosmos_app.roles.adapters import MergeTimes

    return MergeTimes(version, 0.0, 0.0)


async def test_an_engine_is_given_whole_weights_and_the_wire_an_adapter(
    trainer: Trainer, tmp_path: Path
) -> None:
    weights = MergedWeights(WeightSyncConfig(), tmp_path / "model")
    inner = Inner()
    client = MergingClient(inner, weights, WeightSyncConfig())
    try:
        await client.connect([trainer.endpoint])
        assert (await client.load(0)).version == 0
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
        assert inner.staged.tensors.keys() == plain.keys()
        for name, value in inner.staged.tensors.items():  # B is 0: the base itself
            assert torch.equal(value, plain[name]), name
        for version in (1, 2):  # the second begins at the base again
            moved(trainer, version)
            assert (await client.load(version)).version == version
        assert (await client.load(2)).version == 2  # as an engine does that gave it up to sleep
        trainer.version = 2
        trainer.export(tmp_path / "export" / "model")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        adapter = tmp_path / "export" / "model" / ADAPTER_FOLDER
        by_peft = peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "model")
        ids = torch.tensor([[1, 4, 5, 4]])
        with torch.no_grad():
            expected = trainer._learner.model(input_ids=ids).logits
            for served in (by_peft, exported):
                torch.testing.assert_close(served(ids).logits, expected, rtol=1e-5, atol=1e-5)
        for name, value in by_peft.state_dict().items():
            torch.testing.assert_close(inner.staged.tensors[name], value, rtol=0, atol=1e-6)
        # 7 layers of rank 2: far below the whole model
        wire = sum(p.numel() for p in trainer._learner.model.parameters() if p.requires_grad)
        assert wire < 0.5 * sum(value.numel() for value in plain.values())
        moved(trainer, 3)
        await client.load(3)
        assert 4 * wire < weights.wire_bytes < 4 * wire + 2048, "its configuration is JSON"
        assert inner.source.wire_bytes == sum(value.nbytes for value in plain.values())
    finally:
        client.close()
        inner.source.close()
        weights.close()


async def test_adapters_reach_engines_in_four_bits_as_whole_weights_would(
    trainer: Trainer, tmp_path: Path
) -> None:
    config = WeightSyncConfig(quantised="nvfp4")
    weights, again = (MergedWeights(config, tmp_path / "model") for _ in range(2))
    inner, direct = Inner(), ReceivedWeights(config)
    client = MergingClient(inner, weights, config)
    try:
        await client.connect([trainer.endpoint])
        for version in (1, 2):  # the second is written over the first
            moved(trainer, version)
            assert (await client.load(version)).version == version
        merged = again.stage(2, [trainer.endpoint]).tensors
        with WeightSender(quantised_shards(shards_of(merged.items()), config)) as sender:
            sender.publish(2)
            whole = direct.stage(2, [sender.endpoint]).tensors
        assert inner.staged.tensors.keys() == whole.keys()
        for name, value in inner.staged.tensors.items():
            given, wanted = (t.reshape(-1).view(torch.uint8) for t in (value, whole[name]))
            assert torch.equal(given, wanted), name
        packed = inner.staged.tensors["model.layers.0.mlp.down_proj.weight"]
        assert packed.dtype == torch.uint8
    finally:
        client.close()
        for source in (inner.source, direct, weights, again):
            source.close()
