"""A teacher with other tokens than the model is refused before anything is started."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from transformers import Qwen3ForCausalLM

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
    build_padded(folder / "padded", "0123456789+=xyz")
    build_padded(folder / "wordy", "0123456789+=xyzuvw")
    build_padded(folder / "nameless", "0123456789+=xyz")
    for path in (folder / "nameless").glob("tokenizer*.json"):
        path.unlink()
    sums = [(f"{n}+{n}=", str(2 * n)) for n in range(9)]
    rows = [{"prompt": sum_, "answer": total, "response": total} for sum_, total in sums]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def build_padded(directory: Path, characters: str) -> None:
    """Build a model with ten rows more than a tokenizer of 15 characters has tokens."""
    vocab_size = json.loads((directory.parent / "model" / "config.json").read_text())["vocab_size"]
    build_tiny_model(directory, [characters], TINY, seed=0)
    model = Qwen3ForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(vocab_size + 10, mean_resizing=False)
    model.save_pretrained(directory)


def check(folder: Path, kind: str, teacher: str) -> Result:
    recipe, teacher_key, more = {
        "rl": ("quickstart", "model.teacher", ("algorithm.kind=on_policy_distillation",)),
        "given": ("distillation", "teacher", ("data.held_out=1",)),
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


@pytest.mark.parametrize("kind", ["rl", "given"])
def test_a_teacher_with_more_rows_of_padding_passes_check(folder: Path, kind: str) -> None:
    result = check(folder, kind, "padded")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("wordy", "is none of the first 19; they need one vocabulary, padding aside"),
        ("nameless", "it has no tokenizer that would say which are padding"),
    ],
)
def test_rows_that_are_tokens_or_may_be_are_no_padding(
    folder: Path, teacher: str, message: str
) -> None:
    result = check(folder, "given", teacher)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
