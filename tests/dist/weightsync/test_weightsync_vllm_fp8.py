"""A real vLLM serves FP8 weights that were quantised on the sender.

On CPU, vLLM's kernels for blocks need AMX, and it has none for MXFP8 or NVFP4.
"""

import json

import pytest
import torch
from layers_of_fp8 import BLOCKS_OF_FP8, ROWS_OF_FP8
from with_amx import WITH_AMX

from cosmos_weightsync import ReceiverConfig, WeightReceiver, WeightSender, shards_of
from cosmos_weightsync.encodings import BlockFp8, Cast, RowwiseFp8, encode

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # torchao warns of its own extensions.
]

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.12,
}
PROMPT = [1, 2, 3, 4]


ROWS = (RowwiseFp8(names=("*_proj.weight",)), ROWS_OF_FP8)
BLOCKS = (BlockFp8(names=("*_proj.weight",)), BLOCKS_OF_FP8)


@pytest.mark.parametrize(
    ("encoding", "words"),
    [pytest.param(*ROWS, id="rows"), pytest.param(*BLOCKS, id="blocks", marks=WITH_AMX)],
)
def test_vllm_says_what_the_dequantised_model_says(start, tmp_path, encoding, words):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    rules = [encoding, Cast(dtype="bfloat16")]
    with WeightSender(encode(shards_of(model), rules)) as sender:
        sender.publish(1)
        with WeightReceiver([sender.endpoint], config=ReceiverConfig(transport="tcp")) as receiver:
            receiver.stage(1)
            received = {s.spec.name: s.tensor.clone() for s in receiver.staged_shards()}
    safetensors_torch.save_file(received, tmp_path / "model.safetensors", {"format": "pt"})
    described = {
        **config.to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "quantization_config": words,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    setup = {"model": str(tmp_path), "prompt": PROMPT, "num_tokens": 8}
    engine = start("vllm_tokens_process.py", setup)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scales = received.get(f"{name}{encoding.scale_suffix}")
            values = received[name].float()
            if scales is not None:
                sides = (1, values.shape[1]) if scales.shape[1] == 1 else (128, 128)
                values *= torch.kron(scales, torch.ones(sides))
            parameter.copy_(values.bfloat16())
        model = model.bfloat16().eval()
        tokens = torch.tensor([PROMPT])
        for _ in range(8):
            following = model(tokens).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], dim=1)
    assert engine.answer(400)["tokens"] == tokens[0, len(PROMPT) :].tolist()
