"""What a run makes for itself: rows that are right, and a model transformers loads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_app.errors import DataError
from cosmos_app.prepare import (
    NEED_ANSWERS,
    check_inputs,
    prepare_model,
    run_files,
)
from cosmos_app.prepared_data import prepare_data
from cosmos_app.quickstart.arithmetic import ArithmeticConfig, arithmetic_rows
from cosmos_app.quickstart.reversal import ReversalConfig, reversal_rows
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import (
    DataConfig,
    ModelConfig,
    Recipe,
    WarmupConfig,
    controller_config,
)
from cosmos_app.roles.process import RunContext
from cosmos_app.roles.warmup import warm_up
from cosmos_core.config import ConfigError, load_config
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import ModelConfig as HeldModelConfig
from cosmos_rollout import (
    BoxedMathReward,
    ExactReward,
    FormatReward,
    Gsm8kReward,
    LengthReward,
    MathReward,
    MultipleChoiceReward,
    RewardError,
    RewardInput,
    RewardPoolConfig,
)


def test_sums_are_right_and_no_held_out_sum_is_trained_on() -> None:
    train, held_out = arithmetic_rows(
        ArithmeticConfig(max_first=9, max_second=9, held_out=20), seed=3
    )
    assert len(train) == 80
    assert len(held_out) == 20
    prompts = {row["prompt"] for row in train}
    assert prompts.isdisjoint(row["prompt"] for row in held_out)
    for row in train + held_out:
        first, second = row["prompt"].removesuffix("=").split("+")
        assert int(first) + int(second) == int(row["answer"])


def test_a_table_with_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="the table has 4 sums"):
        ArithmeticConfig(max_first=1, max_second=1, held_out=4)


def test_answers_are_prompts_backwards_and_most_are_short() -> None:
    train, held_out = reversal_rows(ReversalConfig(rows=500, held_out=50), seed=3)
    assert (len(train), len(held_out)) == (500, 50)
    assert len({row["prompt"] for row in train + held_out}) == 550
    assert all(row["prompt"] == row["answer"][::-1] + "=" for row in train + held_out)
    lengths = sorted(len(row["answer"]) for row in train)
    assert lengths[-1] == ReversalConfig().max_digits > 4 * lengths[len(lengths) // 2]


def test_digits_to_be_reversed_are_generated_where_a_recipe_has_them(tmp_path: Path) -> None:
    recipe = Recipe(data=DataConfig(reversal=ReversalConfig(rows=40, held_out=8)))
    files = run_files(recipe, tmp_path / "run")
    assert prepare_data(recipe, files) == (40, 8)
    rows = [json.loads(line) for line in files.train.read_text().splitlines()]
    assert rows == reversal_rows(ReversalConfig(rows=40, held_out=8), recipe.seed)[0]


def test_more_strings_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="want at most max_digits"):
        ReversalConfig(median_digits=float("inf"))
    with pytest.raises(ValueError, match="want at most max_digits"):
        ReversalConfig(sigma=float("inf"))
    few = ReversalConfig(rows=100, held_out=1, sigma=0.0, median_digits=2.0)
    with pytest.raises(DataError, match=r"100 different strings were found where .* want 101"):
        reversal_rows(few, seed=0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_tiny_model_loads_and_its_tokenizer_round_trips(tmp_path: Path, tied: bool) -> None:
    config = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2, tie_embeddings=tied)
    parameters = build_tiny_model(tmp_path, ["12+7=19"], config, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("2+9=").input_ids
    assert len(ids) == 5  # one token a character, behind the beginning-of-sequence token
    assert tokenizer.decode(ids, skip_special_tokens=True) == "2+9="
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.tensor([ids])).logits.shape == (1, 5, len(tokenizer))
    weights, config_file = tmp_path / "model.safetensors", tmp_path / "config.json"
    assert weights.stat().st_mode == config_file.stat().st_mode  # whoever reads one reads both


def test_the_same_seed_builds_the_same_model(tmp_path: Path) -> None:
    config = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2)
    for name in ("one", "two"):
        build_tiny_model(tmp_path / name, ["1+1=2"], config, seed=5)
    one, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("one", "two")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_warm_up_is_by_one_process_whatever_ranks_compute_in(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = Recipe(
        model=ModelConfig(
            tiny=TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2),
            training=HeldModelConfig(compute_dtype="bfloat16"),
        ),
        data=DataConfig(arithmetic=ArithmeticConfig(max_first=9, max_second=1, held_out=4)),
        warmup=WarmupConfig(steps=2, batch_size=4),
    )
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        files = run_files(recipe, run.path)
        prepare_data(recipe, files)
        prepare_model(recipe, files)
        context = RunContext(run=run, recipe=recipe, files=files, redis_url="", namespace="")
        assert [report.outcome for _, report in warm_up(context)] == ["updated"] * 2
        assert AutoModelForCausalLM.from_pretrained(files.model).dtype == torch.float32


@pytest.mark.parametrize(
    ("rows", "held_out", "found"),
    [(30, 2, (28, 2)), (30, 256, (27, 3)), (30, 0, (30, 0)), (1, 0, (1, 0))],
)
def test_so_many_rows_are_kept_back(
    tmp_path: Path, rows: int, held_out: int, found: tuple[int, int]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(rows)))
    recipe = Recipe(data=DataConfig(path=path, held_out=held_out))
    files = run_files(recipe, tmp_path / "run")
    assert prepare_data(recipe, files) == found
    told = [json.loads(line)["prompt"] for line in files.train.read_text().splitlines()]
    assert told == [str(n) for n in range(found[0])]


def test_a_row_without_the_answer_that_a_reward_compares_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2"}\n')
    recipe = Recipe(data=DataConfig(path=path))
    with pytest.raises(DataError, match=r"row 2 has no 'answer', which the reward 'exact'"):
        check_inputs(recipe)
    by_length = RewardPoolConfig(rewards=(LengthReward(target=1, limit=2),))
    check_inputs(replace(recipe, reward=by_length))


@pytest.mark.parametrize(
    "config",
    [ExactReward(), BoxedMathReward(), MathReward(), Gsm8kReward(), MultipleChoiceReward(),
     FormatReward(pattern='x'), LengthReward(target=1, limit=2)],
)  # fmt: skip
def test_the_rewards_that_need_an_answer_are_known(config: Any) -> None:
    sample = RewardInput(prompt="1+1=", response="2")
    try:
        config.build()(sample)
        needs_answer = False
    except RewardError:
        needs_answer = True
    assert (config.kind in NEED_ANSWERS) == needs_answer


def test_a_run_that_keeps_nothing_back_builds_its_model_and_validates_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    tiny = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2)
    recipe = Recipe(data=DataConfig(path=path, held_out=0), model=ModelConfig(tiny=tiny))
    files = run_files(recipe, tmp_path / "run")
    assert prepare_data(recipe, files) == (1, 0)
    assert prepare_model(recipe, files) > 0
    assert controller_config(recipe, num_held_out=0).validation.num_prompts == 0


def test_data_of_one_row_that_is_kept_back_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n')
    recipe = Recipe(data=DataConfig(path=path))
    with pytest.raises(DataError, match=r"no row is left to train on.*data\.held_out=0"):
        prepare_data(recipe, run_files(recipe, tmp_path / "run"))


def test_validation_in_between_needs_rows_that_are_held_out(tmp_path: Path) -> None:
    given = ["validation.every=5", f"data.path={tmp_path}", "data.held_out=0"]
    load_config(Recipe, {}, given[:2])
    load_config(Recipe, {}, [*given, f"data.held_out_path={tmp_path}"])
    load_config(Recipe, {}, [given[0], given[2]])  # sums have a table of their own
    with pytest.raises(ConfigError, match=r"validation\.every is 5, and there is nothing"):
        load_config(Recipe, {}, given)


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.replicas=0", "rollout.slots=0", "rollout.sampling.max_new_tokens=0",
        "trainer.groups_per_step=0", "trainer.steps=0", "trainer.checkpoint_every=-1",
        "policy.ranks=0", "policy.replicas=0", "data.held_out=-1", "warmup.steps=-1",
        "validation.every=-1", "bus.lease_s=0", "seed=-1",
        "trainer.keep_checkpoints=0", "launch.restarts=-1", "launch.stop_grace_s=-1",
        "model.tiny.num_layers=0", "rollout.engine.kv_cache_mib=-1",
        "data.reversal.rows=0", "data.reversal.max_digits=0",
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_named(setting: str) -> None:
    name = setting.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"{name} .*\b[01](\.1)? or more"):
        load_config(Recipe, {}, [setting])


@pytest.mark.parametrize(
    "setting",
    [
        "weight_sync.bucket_mib=0", "weight_sync.deadline_s=0", "weight_sync.snapshots=1",
        "rollout.turn_deadline_s=-1", "bus.port=70000", "bus.lease_s=inf", "bus.first_lease_s=inf",
        "bus.first_lease_s=0", "teacher.deadline_s=nan",
        "launch.start_s=0", "launch.save_s=0", "launch.save_s=inf", "launch.save_s=nan",
    ],
)  # fmt: skip
def test_sizes_times_and_ports_that_cannot_be_are_named(setting: str) -> None:
    name = setting.partition("=")[0].rpartition(".")[2]
    with pytest.raises(ConfigError, match=name):
        load_config(Recipe, {}, [setting])


@pytest.mark.parametrize(
    ("settings", "lease_s", "first_s"),
    [
        ((), 30.0, 300.0),
        (("bus.lease_s=900",), 900.0, 900.0),
        (("bus.first_lease_s=45",), 30.0, 45.0),
        (("bus.first_lease_s=10",), 30.0, 30.0),
        (("bus.lease_s=900", "bus.first_lease_s=1000"), 900.0, 1000.0),
    ],
)
def test_a_first_lease_is_as_long_as_the_others_at_least(
    settings: tuple[str, ...], lease_s: float, first_s: float
) -> None:
    recipe = load_config(Recipe, {}, settings)
    config = controller_config(recipe, num_held_out=0)
    assert (config.lease_s, config.first_lease_s) == (lease_s, first_s)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.samples_per_group=1"], "advantage 'grpo', which compares the samples"),
        (["elastic.min_replicas=2"], "min_replicas is 2 and policy.replicas 1"),
        (
            [
                "algorithm.kind=ppo",
                "trainer.samples_per_group=1",
                "trainer.drop_zero_signal=true",
            ],
            "drop_zero_signal would drop every prompt",
        ),
    ],
)
def test_what_would_never_learn_or_never_step_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Recipe, {}, settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.kind=reinforce_pp"],
        ["algorithm.kind=ppo"],
        ["algorithm.kind=on_policy_distillation", "model.teacher=big"],
        ["algorithm.objective.teacher_coefficient=1.0", "model.teacher=big"],
    ],
)
def test_one_sample_of_a_prompt_is_enough_where_none_are_compared(settings: list[str]) -> None:
    alone = load_config(Recipe, {}, [*settings, "trainer.samples_per_group=1"])
    assert alone.trainer.samples_per_group == 1


@pytest.mark.parametrize("size", ["hidden_size", "num_layers"])
def test_a_model_that_would_not_be_tiny_is_refused_before_it_is_built(size: str) -> None:
    with pytest.raises(ConfigError, match=r"are built at random\. Name a larger one by model"):
        load_config(Recipe, {}, [f"model.tiny.{size}=1000000000000"])
