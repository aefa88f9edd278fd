"""A LoRA adapter sent alone is the adapter that peft would have saved."""

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from cosmos_weightsync import LayoutError, WeightReceiver, WeightSender  # noqa: E402
from cosmos_weightsync.encodings import adapter_files, adapter_shards  # noqa: E402

# peft asks torchao what it is, and both warn about their own dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
}


def base_model(**more) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def adapted(model=None, **options):
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], **options)
    model = peft.get_peft_model(base_model(**(model or {})), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # They begin as zeros.
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize("options", [{}, {"bias": "none", "lora_bias": True}, {"use_rslora": True}])
def test_the_files_of_a_received_adapter_give_the_trainers_logits(tmp_path, options):
    trained = adapted(**options)
    tokens = torch.arange(12).reshape(2, 6)
    with WeightSender(adapter_shards(trained)) as sender:
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5)  # What is sent is what trains.
        sender.publish(1)
        with WeightReceiver([sender.endpoint]) as receiver:
            num_bytes = receiver.stage(1).num_bytes
            tensors, config = adapter_files(receiver.staged_shards())
    assert num_bytes == sum(t.nbytes for t in tensors.values()) + len(config)
    assert tensors.keys() == peft.get_peft_model_state_dict(trained).keys()

    safetensors_torch.save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(config)
    served = peft.PeftModel.from_pretrained(base_model(), str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(served(tokens).logits, trained(tokens).logits)
        assert not torch.equal(served(tokens).logits, base_model()(tokens).logits)


def test_one_of_several_adapters_is_sent():
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    names = {shard.spec.name for shard in adapter_shards(model, "other")}
    assert names == {
        *peft.get_peft_model_state_dict(model, adapter_name="other"),
        "adapter_config.json",
    }


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_an_adapter_that_trains_the_models_biases_is_refused(bias):
    """peft saves these beside the LoRA tensors."""
    with_biases = {"attention_bias": True}
    with pytest.raises(LayoutError, match=rf"bias='{bias}' trains .*self_attn\.q_proj\..*bias"):
        adapter_shards(adapted(with_biases, bias=bias))
    adapter_shards(adapted(bias=bias))  # The model has none.


def test_what_is_more_than_lora_is_refused():
    with pytest.raises(LayoutError, match="use_dora"):
        adapter_shards(adapted(use_dora=True))
