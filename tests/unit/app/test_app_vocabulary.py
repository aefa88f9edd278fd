"""A model whose tokenizer lacks its vocabulary is refused before anything starts."""

import json

import pytest

from cosmos_app.errors import DataError
from cosmos_app.prepare import require_model
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model


@pytest.fixture
def model(tmp_path):
    build_tiny_model(tmp_path, ["0123456789+="], TinyModelConfig(), seed=0)
    require_model(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GemmaTokenizer", "GPT2Tokenizer"])
def test_a_tokenizer_of_special_tokens_alone_is_refused(model, kind):
    (model / "tokenizer.json").unlink()
    added = {"0": {"content": "<|im_end|>", "special": True}, "1": {"content": "<tool_call>"}}
    settings = {"tokenizer_class": kind, "added_tokens_decoder": added}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="its tokenizer has no vocabulary"):
        require_model(model)


def test_a_tokenizer_that_cannot_be_made_is_refused(model):
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"model\.path=.*: its tokenizer cannot be loaded"):
        require_model(model)
