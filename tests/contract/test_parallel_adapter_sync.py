"""An adapter that the learner trains travels alone and is what peft would have saved."""

from dataclasses import dataclass, field

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
parallel = pytest.importorskip("cosmos_parallel")
weightsync = pytest.importorskip("cosmos_weightsync")

from cosmos_weightsync.encodings import adapter_files, adapter_shards  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.arange(12).reshape(2, 6)


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict = field(default_factory=dict)


def loss(model, batch):
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch[:, 1:], reduction="sum"
    )
    return Sums(losses, torch.tensor(10.0))


def test_a_trained_adapter_is_fetched_alone_and_served_by_peft(tmp_path):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "base")
    mesh = parallel.build_mesh(parallel.ParallelConfig())
    lora = parallel.ModelConfig(lora=parallel.LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    model = parallel.load_causal_lm(tmp_path / "base", mesh, lora)
    optimizer = parallel.AdamWConfig(lr=1e-2)
    learner = parallel.Learner(model, parallel.LearnerConfig(optimizer=optimizer), mesh=mesh)
    with weightsync.WeightSender(adapter_shards(parallel.PeftView(model))) as sender:
        learner.step([TOKENS], loss)
        sender.publish(1)
        with weightsync.WeightReceiver([sender.endpoint]) as receiver:
            num_bytes = receiver.stage(1).num_bytes
            tensors, text = adapter_files(receiver.staged_shards())
    # in each of 2 layers: q_proj 2 x 32 and 32 x 2, down_proj 2 x 48 and 32 x 2, in float32
    assert num_bytes - len(text) == 2 * 4 * (64 + 64 + 96 + 64)
    served_dir = tmp_path / "adapter"
    served_dir.mkdir()
    safetensors_torch.save_file(tensors, served_dir / "adapter_model.safetensors")
    (served_dir / "adapter_config.json").write_text(text)
    base = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "base")
    served = peft.PeftModel.from_pretrained(base, str(served_dir))
    with torch.no_grad():
        torch.testing.assert_close(served(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-6)
