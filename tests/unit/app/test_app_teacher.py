"""A teacher with other tokens than the model is refused before anything is started."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cosmos_app.cli import main
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model

ROOT = Path(__file__).parents[3]
TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    for name, characters in (("model", "0123456789+=abc"), ("alike", "0123456789+=xyz")):
        build_tiny_model(folder / name, [characters], TINY, seed=0)
    build_tiny_model(folder / "smaller", ["ab"], TINY, seed=0)
    build_tiny_model(folder / "renumbered", ["0123456789+=!#%"], TINY, seed=0)
    sums = [(f"{n}+{n}=", str(2 * n)) for n in range(9)]
    rows = [{"prompt": sum_, "answer": total, "response": total} for sum_, total in sums]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def check(folder: Path, kind: str, teacher: str) -> Result:
    recipe, teacher_key, more = {
        "rl": ("quickstart", "model.teacher", ("algorithm.kind=on_policy_distillation",)),
        "given": ("distillation", "teacher", ()),
    }[kind]
    settings = (
        f"model.path={folder / 'model'}",
        f"{teacher_key}={folder / teacher}",
        f"data.path={folder / 'rows.jsonl'}",
        f"output={folder / 'run'}",
    )
    path = str(ROOT / "configs" / f"{recipe}.toml")
    return CliRunner().invoke(main, ["check", path, *settings, *more])


@pytest.mark.parametrize("kind", ["rl", "given"])
def test_a_teacher_with_other_tokens_is_refused_by_check(folder: Path, kind: str) -> None:
    result = check(folder, kind, "smaller")
    assert result.exit_code == 2, result.output
    assert "they need one vocabulary" in " ".join(result.output.split())
    assert not (folder / "run").exists()


@pytest.mark.parametrize("kind", ["rl", "given"])
def test_a_teacher_with_other_numbers_for_its_tokens_is_refused(folder: Path, kind: str) -> None:
    result = check(folder, kind, "renumbered")
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.split())
    assert "it numbers tokens otherwise than the model ('+' is 7 there and 4 here)" in said


@pytest.mark.parametrize("kind", ["rl", "given"])
def test_a_teacher_with_as_many_tokens_passes_check(folder: Path, kind: str) -> None:
    assert check(folder, kind, "alike").exit_code == 0
