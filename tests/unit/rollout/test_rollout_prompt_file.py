"""Rows that stay in their file are those that are read from it."""

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rollout import PromptDataError, PromptFile, PromptSet, read_prompts

ROWS = [
    {"prompt": "1+1=", "answer": 2, "level": "é"},
    {"id": "q7", "messages": [{"role": "user", "content": "hi"}], "data_set": "chats"},
    {"prompt": "a", "images": ["one.png"]},
]
LINES = st.lists(st.sampled_from([*(json.dumps(row) for row in ROWS), "", "  ", "\t"]), max_size=12)


@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_rows_are_those_that_are_read_at_once(tmp_path_factory, lines, newline, ends):
    path = tmp_path_factory.mktemp("rows") / "data.jsonl"
    text = newline.join([*lines, json.dumps(ROWS[0])]) + newline * ends
    path.write_text(text, encoding="utf-8", newline="")
    rows, expected = PromptFile(path), read_prompts(path)
    assert list(rows) == expected
    assert len(rows) == len(expected)
    assert rows[-1] == expected[-1]
    assert list(rows[::-2]) == expected[::-2]
    assert list(rows.only([0, len(rows) - 1])) == [expected[0], expected[-1]]


def test_a_prompt_set_of_a_file_has_the_order_of_one_of_rows(tmp_path):
    path = written(tmp_path, 50)
    of_file, of_rows = PromptSet(PromptFile(path), seed=3), PromptSet(read_prompts(path), seed=3)
    assert [of_file.row(k) for k in range(120)] == [of_rows.row(k) for k in range(120)]


def test_rows_are_there_when_their_file_has_gone_elsewhere(tmp_path):
    path = written(tmp_path, 5)
    rows = PromptFile(path)
    path.rename(tmp_path / "elsewhere.jsonl")
    assert rows[4].prompt == "4="


def test_threads_read_side_by_side(tmp_path):
    rows = PromptFile(written(tmp_path, 2000))
    with ThreadPoolExecutor(8) as pool:
        prompts = list(pool.map(lambda k: rows[k].prompt, range(2000)))
    assert prompts == [f"{k}=" for k in range(2000)]


def test_a_wrong_row_is_told_where_it_is_when_it_is_asked_for(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": }\n{"prompt": "\xe9"}\n[1, 2, 3, 4, 5, 6]\n')
    rows = PromptFile(path)
    assert rows[0].prompt == "a"
    for index, words in enumerate((r"jsonl:3: column \d+: not JSON", "jsonl:4: not UTF-8"), 1):
        with pytest.raises(PromptDataError, match=words):
            _ = rows[index]
    with pytest.raises(PromptDataError, match="jsonl:5: a row has to be an object"):
        _ = rows[3]
    with pytest.raises(IndexError):
        _ = rows[4]


def test_a_file_without_rows_and_none_at_all_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(PromptDataError, match="has no rows"):
        PromptFile(tmp_path / "empty.jsonl")
    with pytest.raises(PromptDataError, match="there is no prompt file"):
        PromptFile(tmp_path / "none.jsonl")


def test_rows_that_were_not_asked_for_take_no_memory_but_their_place(tmp_path):
    path = written(tmp_path, 20_000)
    tracemalloc.start()
    rows = PromptFile(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 20_000
    assert held < 20 * len(rows)


def written(folder: Path, num_rows: int) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{k}="}) + "\n" for k in range(num_rows)))
    return path
