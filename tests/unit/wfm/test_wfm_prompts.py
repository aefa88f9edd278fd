"""Prompt sets from files and directories."""

import json
from pathlib import Path

import pytest

from cosmos_wfm import Prompt, WfmConfigError, read_prompts
from cosmos_wfm.prompts import request_fields


def test_lines_json_lines_and_directories_of_published_sets_are_read(tmp_path):
    for name, file in (("pickscore", "train.txt"), ("geneval", "train_metadata.jsonl")):
        (tmp_path / name).mkdir()
        rows = ["a cat ", "", "two dogs"]
        if file.endswith("jsonl"):
            rows = [json.dumps({"prompt": row, "tag": "x"}) if row else "" for row in rows]
        (tmp_path / name / file).write_text("\n".join(rows))
        for path in (tmp_path / name, tmp_path / name / file):
            prompts = read_prompts(path, 2)
            assert prompts == ["a cat", "two dogs"]
            tagged = {"tag": "x"} if file.endswith("jsonl") else {}
            assert [prompt.metadata for prompt in prompts] == [tagged] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{prompt}', "line 2 is no JSON"),
        ('\n{"text": "a"}', "line 2 has no text called prompt"),
        ("[1]", "line 1 has no text called prompt"),
        ('{"prompt": " "}', "line 1 has no text called prompt"),
        ('{"prompt": "a"}', "1 prompts, but 2 are needed at once"),
    ],
)
def test_what_is_wrong_with_a_set_is_said_with_its_line(tmp_path, text, message):
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(WfmConfigError, match=message):
        read_prompts(tmp_path, 2)


def test_marks_of_windows_and_of_unicode_are_no_part_of_a_prompt_and_do_not_end_it(tmp_path):
    prompt = "ein Schloß\u2028am Meer"
    row = json.dumps({"prompt": prompt}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(f"\ufeff{row}\r\n{row}\r\n".encode())
    (tmp_path / "a.txt").write_bytes(f"\ufeff{prompt}\r\n".encode())
    (tmp_path / "b.txt").write_bytes("ein Schloß".encode("latin-1"))

    assert read_prompts(tmp_path / "a.jsonl", 2) == [prompt, prompt]
    assert read_prompts(tmp_path / "a.txt", 1) == [prompt]
    with pytest.raises(WfmConfigError, match=r"b\.txt is no text in UTF-8"):
        read_prompts(tmp_path / "b.txt", 1)


def test_a_directory_without_prompts_is_none(tmp_path):
    with pytest.raises(WfmConfigError, match=r"has none of train_metadata\.jsonl"):
        read_prompts(tmp_path, 1)


def test_what_lines_say_beside_their_prompts_goes_to_rewards():
    includes = [[{"class": "dog", "count": 2}], [{"class": "cat"}]]
    rows = [{"tag": "counting", "include": includes[0]}, {"tag": "single", "include": includes[1]}]
    prompts = [Prompt("two dogs", rows[0]), Prompt("a cat", rows[1])]

    assert request_fields(prompts) == {
        "prompt_metadata": rows,
        "geneval_includes": includes,
        "geneval_tags": ["counting", "single"],
    }
    # A name of GenEval's goes only if every prompt has it; a plain prompt has nothing.
    mixed = [prompts[0], "a plain one"]
    assert request_fields(mixed) == {"prompt_metadata": [rows[0], {}]}
    assert request_fields(["a", Prompt("b")]) == {}


def test_mock_prompts_are_coloured_shapes_unless_there_is_a_file_of_that_name(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert read_prompts(Path("mock"), 16)[:2] == ["a red square", "a green square"]
    Path("mock").write_text("mine\n")
    assert read_prompts(Path("mock"), 1) == ["mine"]
