"""Prompt sets from files and directories."""

import json

import pytest

from cosmos_wfm import WfmConfigError
from cosmos_wfm.prompts import read_prompts


def test_lines_json_lines_and_directories_of_published_sets_are_read(tmp_path):
    for name, file in (("pickscore", "train.txt"), ("geneval", "train_metadata.jsonl")):
        (tmp_path / name).mkdir()
        rows = ["a cat ", "", "two dogs"]
        if file.endswith("jsonl"):
            rows = [json.dumps({"prompt": row, "tag": "x"}) if row else "" for row in rows]
        (tmp_path / name / file).write_text("\n".join(rows))
        for path in (tmp_path / name, tmp_path / name / file):
            assert read_prompts(path, 2) == ["a cat", "two dogs"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{prompt}', "line 2 is no JSON"),
        ('\n{"text": "a"}', "line 2 has no text called prompt"),
        ("[1]", "line 1 has no text called prompt"),
        ('{"prompt": " "}', "line 1 has no text called prompt"),
        ('{"prompt": "a"}', "1 prompts, but a step has 2 groups"),
    ],
)
def test_what_is_wrong_with_a_set_is_said_with_its_line(tmp_path, text, message):
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(WfmConfigError, match=message):
        read_prompts(tmp_path, 2)


def test_a_directory_without_prompts_is_none(tmp_path):
    with pytest.raises(WfmConfigError, match=r"has none of train_metadata\.jsonl"):
        read_prompts(tmp_path, 1)
