"""What models that score need beyond the package itself, and what is said without it."""

import io
import json

import pytest
import transformers

from cosmos_wfm import WfmConfigError
from cosmos_wfm.model_rewards.pictures import from_directory, what_to_install

PROMPT = "a blue disc beside a red box"


@pytest.fixture(scope="module")
def pieces_dir(tmp_path_factory):
    """A tokenizer that is a file of SentencePiece alone, as some released models have it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    directory, model = tmp_path_factory.mktemp("pieces"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([PROMPT] * 5),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "sentencepiece.bpe.model").write_bytes(model.getvalue())
    for file, said in (
        ("config.json", {"model_type": "xlm-roberta"}),
        ("tokenizer_config.json", {"tokenizer_class": "XLMRobertaTokenizer"}),
    ):
        (directory / file).write_text(json.dumps(said))
    return directory


def test_a_tokenizer_of_sentencepiece_is_read(pieces_dir):
    tokenizer = from_directory(transformers.AutoTokenizer, str(pieces_dir), "ocr")
    numbers = tokenizer(PROMPT)["input_ids"]
    assert tokenizer.decode(numbers, skip_special_tokens=True) == PROMPT


def test_an_error_says_which_libraries_of_the_extra_are_not_there(tmp_path):
    assert what_to_install(("json", "io")) == ""
    found = what_to_install(("json", "no_library_of_this_name"))
    assert found == "; no_library_of_this_name not there: pip install 'cosmos-wfm[rewards]'"
    with pytest.raises(WfmConfigError, match=f"ocr: {tmp_path} cannot be loaded"):
        from_directory(transformers.AutoTokenizer, str(tmp_path), "ocr")
