"""A model published with its LoRA adapter is the one that peft would have merged."""

import copy

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from cosmos_weightsync import LayoutError, WeightReceiver, WeightSender  # noqa: E402
from cosmos_weightsync.encodings import merged_shards  # noqa: E402

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
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(kind: str = "llama", sizes: dict | None = None, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **(sizes or {}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    options = {"target_modules": ["q_proj", "down_proj"], **options}
    config = peft.LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).eval()


def received(sender: WeightSender, version: int) -> dict[str, torch.Tensor]:
    with WeightReceiver([sender.endpoint]) as receiver:
        receiver.stage(version)
        return {shard.spec.name: shard.tensor.clone() for shard in receiver.staged_shards()}


def merged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By peft, in a copy."""
    return dict(copy.deepcopy(model).merge_and_unload().named_parameters())


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> set[str]:
    assert found.keys() == wanted.keys()
    return {name for name in wanted if not torch.equal(found[name], wanted[name])}


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"use_rslora": True, "target_modules": ["embed_tokens", "v_proj"]}),
        ("llama", {}, {"modules_to_save": ["lm_head"]}),
        ("llama", {"tie_word_embeddings": True}, {}),
        ("qwen3_moe", MOE, {"target_parameters": BOTH}),
    ],
    ids=["linear", "embedding", "saved", "tied", "experts"],
)
def test_what_arrives_is_what_peft_would_have_merged(kind, sizes, options):
    model = adapted(kind, sizes, **options)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with WeightSender(merged_shards(model)) as sender:
        sender.publish(1)
        assert differing(received(sender, 1), merged(model)) == set()
        assert differing(dict(model.named_parameters()), before) == set()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5)
        sender.publish(2)
        assert differing(received(sender, 2), merged(model)) == set()


def test_the_frozen_weights_never_drift():
    """peft's own merging and taking apart rounds twice, in place, with every version."""
    model = adapted().bfloat16()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with WeightSender(merged_shards(model)) as sender:
        for version in range(20):
            sender.publish(version)
        assert differing(dict(model.named_parameters()), before) == set()
    for _ in range(20):
        model.merge_adapter()
        model.unmerge_adapter()
    assert differing(dict(model.named_parameters()), before) != set()


def test_an_adapter_that_is_merged_already_is_not_added_once_more():
    model = adapted()
    with WeightSender(merged_shards(model, dtype="bfloat16")) as sender:
        wanted = {name: tensor.bfloat16() for name, tensor in merged(model).items()}
        model.merge_adapter()
        sender.publish(1)
        assert differing(received(sender, 1), wanted) == set()


def test_wrapped_models_keep_their_names():
    model = adapted()
    names = {spec.name for spec in merged_shards(torch.compile(model, backend="eager")).specs}
    assert names == merged(model).keys()


@pytest.mark.parametrize(
    ("model", "adapter", "words"),
    [
        (lambda: adapted(use_dora=True), "default", "use_dora is not plain LoRA"),
        (lambda: adapted(lora_bias=True), "default", "lora_bias is not plain LoRA"),
        (lambda: adapted(), "other", r"no adapter 'other'; the module has \['default'\]"),
        (lambda: torch.nn.Linear(2, 2), "default", r"the module has \[\]"),
        (
            lambda: adapted(sizes={"tie_word_embeddings": True}, target_modules=["embed_tokens"]),
            "default",
            "embed_tokens.weight: has an adapter, and lm_head.weight is the same tensor",
        ),
    ],
)
def test_what_cannot_be_merged_on_the_way_is_refused(model, adapter, words):
    with pytest.raises(LayoutError, match=words):
        merged_shards(model(), adapter)
