"""Examples that are encoded into a folder are those of the rows, whoever encodes them."""

import json
from pathlib import Path

import numpy as np
import pytest

from cosmos_parallel import (
    Encoders,
    SftDataError,
    SftFormat,
    is_stored,
    load_sft_data,
    store_sft_data,
    stored_sft_data,
)

ROWS = SftFormat(max_tokens=12)


@pytest.fixture
def model(tmp_path, model_directory, tokenizer) -> Path:
    """A directory that a tokenizer is read from."""
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    config = (model_directory("Qwen3") / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config)
    return folder


def data(path: Path, num_rows: int = 600) -> Path:
    """Prompts, conversations of two answers, and some of either that are too long."""
    rows = []
    for k in range(num_rows):
        if k % 3:
            rows.append({"prompt": f"{k}+1=", "response": str(k + 1) * (1 + k % 7)})
        else:
            said = [("user", "a"), ("assistant", str(k % 10))] * 2
            rows.append({"messages": [{"role": r, "content": c} for r, c in said]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_same(found, expected) -> None:
    assert found.num_dropped == expected.num_dropped
    assert [len(row) for row in found.by_row()] == [len(row) for row in expected.by_row()]
    for one, other in zip(found.examples, expected.examples, strict=True):
        assert one.token_ids.dtype == np.int32
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.trainable, other.trainable)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_stored_is_what_is_loaded(tmp_path, model, tokenizer, processes):
    path, told = data(tmp_path / "data.jsonl"), []
    store_sft_data(
        tmp_path / "store",
        path,
        model,
        ROWS,
        encoders=Encoders(processes=processes, alone=100),
        told=told.append,
    )
    expected = load_sft_data(path, tokenizer, ROWS)
    assert expected.num_dropped
    assert_same(stored_sft_data(tmp_path / "store", path, model, ROWS), expected)
    assert told == sorted(told)
    assert told[-1] == 600


def test_what_has_changed_since_is_not_taken(tmp_path, model):
    path, store = data(tmp_path / "data.jsonl"), tmp_path / "store"
    assert stored_sft_data(store, path, model, ROWS) is None
    store_sft_data(store, path, model, ROWS)
    assert is_stored(store, path, model, ROWS)
    assert not is_stored(store, path, model, SftFormat(max_tokens=13))
    template = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**template, "eos_token": "<a>"}))
    assert stored_sft_data(store, path, model, ROWS) is None
    store_sft_data(store, path, model, ROWS)
    data(path, 601)
    assert stored_sft_data(store, path, model, ROWS) is None


def test_a_row_that_is_no_example_is_told_and_nothing_is_replaced(tmp_path, model):
    path, store = data(tmp_path / "data.jsonl"), tmp_path / "store"
    store_sft_data(store, path, model, ROWS)
    before = path.read_text()
    path.write_text(before + '{"prompt": 5, "response": "x"}\n' + before)
    with pytest.raises(SftDataError, match=r"data\.jsonl:601: .*prompt"):
        store_sft_data(store, path, model, ROWS, encoders=Encoders(processes=2, alone=100))
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == ["model", "store"]
    assert stored_sft_data(store, path, model, ROWS) is None


def test_data_without_an_example_that_fits_is_refused(tmp_path, model):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "aaaaaaaaaaaaaaaa", "response": "b"}\n')
    with pytest.raises(SftDataError, match=r"no example of at most 12 tokens \(1 are longer\)"):
        store_sft_data(tmp_path / "store", path, model, ROWS)
    assert not (tmp_path / "store").exists()


def test_who_asked_may_end_it(tmp_path, model):
    def told(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_sft_data(tmp_path / "store", data(tmp_path / "data.jsonl"), model, ROWS, told=told)
    assert [one.name for one in tmp_path.iterdir() if one.is_dir()] == ["model"]
