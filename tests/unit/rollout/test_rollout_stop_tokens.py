"""Which tokens end an answer."""

import json
from types import SimpleNamespace

import pytest

from cosmos_rollout import EngineStartError, stop_tokens


@pytest.mark.parametrize(
    ("said", "own", "ends"),
    [
        ({"eos_token_id": [1, 107]}, 1, (1, 107)),  # as Gemma 2 has it
        ({"eos_token_id": [32000, 32007]}, 32000, (32000, 32007)),  # Phi 3
        ({"eos_token_id": 5}, 9, (9, 5)),
        ({"eos_token_id": None}, 9, (9,)),
        ({"temperature": 0.6}, None, ()),
        (None, 9, (9,)),
    ],
)
def test_answers_end_as_tokenizer_and_model_say(tmp_path, said, own, ends):
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert stop_tokens(SimpleNamespace(eos_token_id=own), tmp_path) == ends


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(EngineStartError, match=r"generation_config\.json cannot be read"):
        stop_tokens(SimpleNamespace(eos_token_id=1), tmp_path)
