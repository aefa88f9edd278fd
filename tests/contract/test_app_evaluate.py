"""``cosmos-app evaluate`` asks a real server a recipe's held-out prompts, over real sockets."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch")

from openai_server import ServedEngine, start_process  # noqa: E402
from real_runs import ROOT, SUMS  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from cosmos_app.cli import main  # noqa: E402
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model  # noqa: E402
from cosmos_rollout import TransformersConfig  # noqa: E402

LETTERS = ["0123456789+= "]
PROMPTS = ["1+2=", "34+5=", "6+7=", "8+90="]
MOST = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    path = folder / "model"
    size = TinyModelConfig(num_layers=1, hidden_size=32, num_heads=2)
    build_tiny_model(path, LETTERS, size, 0)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServedEngine]:
    served = ServedEngine(TransformersConfig(), model)
    served.start()
    yield served
    served.stop()


def greedy_answer(model: Path, prompt: str) -> str:
    """What a model answers, by passes of transformers over all that was said so far."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = tokenizer.encode(prompt)
    said: list[int] = []
    while len(said) < MOST and tokenizer.eos_token_id not in said:
        with torch.no_grad():
            logits = network(torch.tensor([tokens + said])).logits[0, -1]
        said.append(int(logits.argmax()))
    return tokenizer.decode(said, skip_special_tokens=True)


def write_rows(path: Path, rows: Sequence[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(model: Path, rows: Path) -> list[str]:
    """A recipe of which every row of a file is held out."""
    return [
        str(SUMS),
        f"model.path={model}",
        f"data.path={rows}",
        f"data.held_out_path={rows}",
        f"rollout.sampling.max_new_tokens={MOST}",
    ]


def evaluate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["evaluate", *arguments])


def words_of(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def rows(folder: Path, model: Path) -> Path:
    """Of four answers to be compared with two are what the model says."""
    right = [{"prompt": prompt, "answer": greedy_answer(model, prompt)} for prompt in PROMPTS[:2]]
    wrong = [{"prompt": prompt, "answer": "no such text"} for prompt in PROMPTS[2:]]
    return write_rows(folder / "rows.jsonl", [*right, *wrong])


def test_a_server_is_as_good_as_the_answers_that_it_gives(
    server: ServedEngine, model: Path, rows: Path, tmp_path: Path
) -> None:
    samples = tmp_path / "samples.jsonl"
    result = evaluate(
        *settings(model, rows), "--url", server.url, "--model", "tiny", "--json",
        "--samples", str(samples),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["accuracy"], found["reward"], found["rewards"]) == (0.5, 0.5, {"exact": 0.5})
    assert (found["num_prompts"], found["num_failed"], found["failures"]) == (4, 0, {})
    answers = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {answer["prompt"]: answer["response"] for answer in answers} == {
        prompt: greedy_answer(model, prompt) for prompt in PROMPTS
    }
    assert "4 of 4 prompts" in result.stderr


def test_answers_without_a_reward_are_counted_and_cost_their_prompt(
    server: ServedEngine, model: Path, rows: Path, tmp_path: Path
) -> None:
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    more = write_rows(tmp_path / "rows.jsonl", [*given, {"prompt": "1+1=", "id": "bare"}])
    result = evaluate(*settings(model, more), "--url", server.url, "--model", "tiny")
    assert result.exit_code == 0, result.output
    said = words_of(result)
    assert "4 answered, 1 failed" in said
    assert "accuracy │ 0.500" in said
    assert "failed: exact: RewardError" in said


def test_several_answers_are_drawn_as_the_recipe_validates(
    server: ServedEngine, model: Path, rows: Path
) -> None:
    drawn = [*settings(model, rows), "validation.samples=3", "validation.temperature=1.0"]
    result = evaluate(*drawn, "--url", server.url, "--model", "tiny", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["num_prompts"], found["num_samples"]) == (4, 3)
    again = evaluate(*drawn, "--url", server.url, "--model", "tiny", "--json")
    first, second = (json.loads(one.stdout) for one in (result, again))
    assert {**first, "seconds": 0.0} == {**second, "seconds": 0.0}, "seeds are those of the run"


def test_nobody_at_the_address_is_said_at_once(model: Path, rows: Path) -> None:
    result = evaluate(
        *settings(model, rows), "--url", "http://127.0.0.1:9/v1", "--model", "tiny"
    )  # fmt: skip
    assert result.exit_code == 1
    assert "http://127.0.0.1:9/v1 is no endpoint to use: ConnectError" in words_of(result)


def test_a_model_that_the_server_does_not_have_is_named(
    server: ServedEngine, model: Path, rows: Path
) -> None:
    result = evaluate(*settings(model, rows), "--url", server.url, "--model", "large")
    assert result.exit_code == 1
    assert "serves ['tiny'], not 'large'" in words_of(result)


def test_a_server_with_other_tokens_is_refused(
    server: ServedEngine, rows: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    build_tiny_model(other, ["!0123456789+= "], TinyModelConfig(), 0)
    result = evaluate(*settings(other, rows), "--url", server.url, "--model", "tiny")
    assert result.exit_code == 2
    said = words_of(result)
    assert f"{server.url} has other tokens than the recipe's model" in said
    assert "model.path has to have the tokenizer of the server" in said


def test_a_context_that_would_cut_answers_is_refused_with_what_is_needed(
    model: Path, rows: Path
) -> None:
    short = ServedEngine(TransformersConfig(context_length=8), model)
    short.start()
    try:
        result = evaluate(*settings(model, rows), "--url", short.url, "--model", "tiny")
    finally:
        short.stop()
    assert result.exit_code == 2
    longest = max(len(AutoTokenizer.from_pretrained(model).encode(one)) for one in PROMPTS)
    said = words_of(result)
    assert f"the longest prompt has {longest} and an answer up to {MOST}" in said
    assert f"vllm serve --max-model-len {longest + MOST}" in said


def test_a_server_that_dies_ends_it_and_says_how_much_was_left(model: Path, rows: Path) -> None:
    process, url = start_process(model, dies_after=2)
    try:
        result = evaluate(
            *settings(model, rows), "data.held_out=0", "--url", url, "--model", "tiny",
            "--timeout", "3", "--max-running", "1",
        )  # fmt: skip
        assert process.wait(30) == -9
    finally:
        process.kill()
        process.communicate()
    assert result.exit_code == 1
    said = words_of(result)
    assert f"{url} failed 3 times in a row, with 2 prompts left: " in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([str(SUMS), "--url", "localhost:1/v1", "--model", "m"], "has to begin with http"),
        (
            [str(ROOT / "configs" / "sft.toml"), "--url", "http://localhost:1/v1", "--model", "m"],
            "has no prompts with rewards to evaluate on",
        ),
        (
            [str(SUMS), "output=nowhere", "--url", "http://localhost:1/v1", "--model", "m"],
            "there is no tokenizer",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_an_error_of_the_call(arguments: list[str], words: str) -> None:
    result = evaluate(*arguments)
    assert result.exit_code == 2
    assert words in words_of(result)


def test_a_recipe_that_keeps_nothing_back_has_nothing_to_evaluate_on(
    model: Path, rows: Path
) -> None:
    result = evaluate(
        str(SUMS), f"model.path={model}", f"data.path={rows}", "data.held_out=0",
        "--url", "http://localhost:1/v1", "--model", "m",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "there is nothing to evaluate on" in words_of(result)
