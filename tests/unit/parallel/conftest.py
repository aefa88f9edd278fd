"""Tiny models and a tokenizer, built once."""

from pathlib import Path

import pytest
import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "attention_dropout": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    """A character tokenizer with an end token and chat marks."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "</s>", "<u>", "<a>", "<s>"]
    characters = list("0123456789+-=? abcdefghijklmnopqrstuvwxyz")
    vocabulary = {token: index for index, token in enumerate([*specials, *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory, tokenizer):
    """Return a function from model kind and tying to a directory in Hugging Face form."""
    import transformers

    made: dict[tuple[str, bool], Path] = {}

    def build(kind: str = "Qwen3", *, tied: bool = True) -> Path:
        if (kind, tied) not in made:
            torch.manual_seed(0)
            path = tmp_path_factory.mktemp(f"{kind}-{tied}".lower())
            sizes = SIZES | (EXPERTS if "Moe" in kind else {})
            config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=tied)
            getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
            tokenizer.save_pretrained(path)
            made[kind, tied] = path
        return made[kind, tied]

    return build
