"""What ``cosmos-app check`` says of recipes whose data has pictures."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from capabilities import needs
from click.testing import CliRunner, Result
from clips import write_clip
from seeing import write_pictures, write_seeing_model
from tiny_models import random_qwen3
from transformers import AutoTokenizer

from cosmos_app.cli import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")
    write_seeing_model(folder / "model")
    write_pictures(folder)
    random_qwen3(0, vocabulary=104, context=64).save_pretrained(folder / "blind")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "blind")
    row = {"prompt": "Which colour?", "answer": "red", "images": ["red-28x28.png"]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    write_clip(folder / "clip.mp4", [(255, 0, 0)] * 8)
    moving = {"prompt": "Which colour?", "answer": "red", "videos": ["clip.mp4"]}
    (folder / "clips.jsonl").write_text(json.dumps(moving) + "\n")
    gone = {**row, "images": ["gone.png"]}
    (folder / "gone.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(gone) + "\n")
    return folder


def check(folder: Path, *settings: str, recipe: str = "quickstart") -> Result:
    given = (f"data.path={folder / 'rows.jsonl'}", *settings)
    path = str(ROOT / "configs" / f"{recipe}.toml")
    return CliRunner().invoke(main, ["check", path, *given])


def test_a_model_that_sees_passes_and_its_parameters_are_counted(folder: Path) -> None:
    result = check(folder, f"model.path={folder / 'model'}")
    assert result.exit_code == 0, result.output
    assert "303,680 parameters" in result.output


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "name a model that sees by model.path"),
        (("model.path={folder}/blind",), "sees none: it is of type qwen3"),
        (
            ("model.path={folder}/model", "rollout.engine.kind=transformers"),
            "rollout.engine.kind='transformers' does not take",
        ),
        (
            (
                "model.path={folder}/model",
                "algorithm.kind=on_policy_distillation",
                "model.teacher={folder}/model",
                "teacher.replicas=1",
                "teacher.engine.kind=transformers",
            ),
            "teacher.engine.kind='transformers' does not take",
        ),
        (
            (
                "model.path={folder}/model",
                "algorithm.kind=on_policy_distillation",
                "teacher.urls=['http://localhost:1/v1']",
            ),
            "servers at teacher.urls are not shown",
        ),
        (
            (
                "model.path={folder}/model",
                "algorithm.kind=on_policy_distillation",
                "model.teacher={folder}/blind",
            ),
            "blind sees none",
        ),
        (
            ("model.path={folder}/model", "data.path={folder}/gone.jsonl"),
            r"gone.jsonl:2: .*No such file",
        ),
        (
            ("model.path={folder}/blind", "data.path={folder}/clips.jsonl"),
            "sees none: it is of type qwen3",
        ),
        pytest.param(
            ("model.path={folder}/model", "data.path={folder}/clips.jsonl"),
            "clips.jsonl: has videos: .*pip install torchvision",
            marks=needs("no-torchvision", find_spec("torchvision") is None),
        ),
        (
            (
                "model.path={folder}/model",
                "data.path={folder}/clips.jsonl",
                "data.video_sampling={{fps=0}}",
            ),
            "fps > 0",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_starts(
    folder: Path, settings: tuple[str, ...], words: str
) -> None:
    result = check(folder, *(setting.format(folder=folder) for setting in settings))
    assert result.exit_code == 2, result.output
    assert re.search(words, " ".join(result.output.split()))


def test_a_run_on_given_data_is_checked_likewise(folder: Path) -> None:
    rows = [{"prompt": "Which colour?", "response": "red", "images": ["red-28x28.png"]}] * 8
    (folder / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.path={folder / 'given.jsonl'}"
    kept = "data.held_out=1"
    seen = check(folder, data, kept, f"model.path={folder / 'model'}", recipe="sft")
    assert seen.exit_code == 0, seen.output
    blind = check(folder, data, kept, f"model.path={folder / 'blind'}", recipe="sft")
    assert blind.exit_code == 2, blind.output
    assert "the model sees none" in " ".join(blind.output.split())
