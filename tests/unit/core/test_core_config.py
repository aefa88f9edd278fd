"""Configuration: from tables to frozen objects, and what is said when that fails."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pydantic import Field

from cosmos_core.config import (
    ConfigError,
    ConfigProblem,
    config_from_json,
    config_to_json,
    describe_config,
    load_config,
)
from cosmos_core.config.schema import in_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Vllm:
    """The fast engine.

    Attributes:
        kind: which engine.
        max_len: longest sequence in tokens.
        extra: passed on as it is.
        limits: numbers, or their names.
    """

    kind: Literal["vllm"] = "vllm"
    max_len: int = 256
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    limits: Mapping[str, int | str] = field(default_factory=dict[str, int | str])


@dataclass(frozen=True, kw_only=True, slots=True)
class Scripted:
    """The engine of tests."""

    kind: Literal["scripted"] = "scripted"
    answer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Console:
    """Lines on the terminal."""

    kind: Literal["console"] = "console"
    every: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """Lines in a file."""

    kind: Literal["file"] = "file"
    path: Path = Path("metrics.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """How weights change.

    Attributes:
        lr: learning rate of the first
            group of parameters.
        steps: how many.
        betas: decay of the two moments.
        clip: largest gradient norm; none clips nothing.
        dtype: of the weights.
        resume: go on where the run stopped.
    """

    lr: float = 1e-3
    steps: Annotated[int, Field(ge=1)] = 10
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    resume: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr has to be positive, found {self.lr}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The root.

    Attributes:
        model: where the model is.
        trainer: how weights change.
    """

    model: Path
    seed: int = 0
    trainer: Trainer = field(default_factory=lambda: Trainer(lr=3e-4, name="slow"))
    engine: Vllm | Scripted = field(default_factory=lambda: Vllm(max_len=64))
    sinks: tuple[Console | File, ...] = (Console(), File())
    rewards: Mapping[str, Scripted] = field(default_factory=dict[str, Scripted])
    judge: Vllm | None = None
    stops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.seed > 100 and self.trainer.resume:
            raise ValueError("a run with a seed above 100 cannot resume")


def load(*overrides: str, **tables: object) -> Recipe:
    return load_config(Recipe, {"model": "m", **tables}, overrides)


def complaint(*overrides: str, **tables: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **tables)
    return str(caught.value)


def test_a_file_of_one_line_gives_every_default(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('model = "m"')
    assert load_config(Recipe, recipe) == Recipe(model=Path("m"))


def test_a_file_of_windows_is_read_and_one_that_is_no_utf8_is_named(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes('model = "m"\r\n'.encode("utf-8-sig"))
    assert load_config(Recipe, recipe) == Recipe(model=Path("m"))
    recipe.write_text('model = "m"', encoding="utf-16")
    with pytest.raises(ConfigError, match=r"recipe.toml: not UTF-8: .*save it as UTF-8"):
        load_config(Recipe, recipe)


def test_tables_nest_and_unions_go_by_kind():
    recipe = load(
        engine={"kind": "scripted", "answer": "12"},
        sinks=[{"kind": "file", "path": "x"}, {"kind": "console", "every": 5}],
        rewards={"exact": {"answer": "1"}},
        judge={"max_len": 7},
        trainer={"steps": 2, "betas": [0, 0.5]},
    )
    assert recipe.engine == Scripted(answer="12")
    assert recipe.sinks == (File(path=Path("x")), Console(every=5))
    assert recipe.rewards == {"exact": Scripted(answer="1")}
    assert recipe.judge == Vllm(max_len=7)
    assert recipe.trainer.betas == (0.0, 0.5)


def test_a_table_keeps_the_defaults_that_its_parent_gives():
    recipe = load(trainer={"steps": 2}, engine={"extra": {"a": 1}})
    assert recipe.trainer == Trainer(lr=3e-4, name="slow", steps=2)
    assert recipe.engine == Vllm(max_len=64, extra={"a": 1})


def test_a_ready_object_is_taken_as_it_is():
    assert load(trainer=Trainer(steps=3)).trainer == Trainer(steps=3)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("trainer.lr=3e-6", lambda r: r.trainer.lr, 3e-6),
        ("trainer.lr=1", lambda r: r.trainer.lr, 1.0),
        ("model=my-hf-model", lambda r: r.model, Path("my-hf-model")),
        ('model="quoted"', lambda r: r.model, Path("quoted")),
        ("model=2026", lambda r: r.model, Path("2026")),  # text is read as the field's type
        ("trainer.name=true", lambda r: r.trainer.name, "true"),
        ("trainer.name=2026-11-21", lambda r: r.trainer.name, "2026-11-21"),
        ("trainer.name=a=b", lambda r: r.trainer.name, "a=b"),
        ("trainer.name=", lambda r: r.trainer.name, ""),
        ("trainer.name=none", lambda r: r.trainer.name, None),
        ('trainer.name="none"', lambda r: r.trainer.name, "none"),
        ("trainer.clip=none", lambda r: r.trainer.clip, None),
        ("trainer.clip=inf", lambda r: r.trainer.clip, math.inf),
        ("trainer.resume=true", lambda r: r.trainer.resume, True),
        ("trainer.betas=[0.5, 0.6]", lambda r: r.trainer.betas, (0.5, 0.6)),
        ("trainer.betas.1=0.99", lambda r: r.trainer.betas, (0.9, 0.99)),
        ("trainer={steps=4}", lambda r: r.trainer, Trainer(lr=3e-4, name="slow", steps=4)),
        ("engine.max_len=8", lambda r: r.engine, Vllm(max_len=8)),
        ("engine.kind=scripted", lambda r: r.engine, Scripted()),
        ("engine.extra.block.size=16", lambda r: r.engine.extra, {"block": {"size": 16}}),
        ("judge.max_len=8", lambda r: r.judge, Vllm(max_len=8)),
        ("sinks.0.every=5", lambda r: r.sinks, (Console(every=5), File())),
        ("sinks.2.kind=file", lambda r: r.sinks, (Console(), File(), File())),
        ("sinks=[]", lambda r: r.sinks, ()),
        ("rewards.exact.answer=7", lambda r: r.rewards, {"exact": Scripted(answer="7")}),
        ('rewards."a.b".answer=7', lambda r: r.rewards, {"a.b": Scripted(answer="7")}),
        ("stops=[1, 2]", lambda r: r.stops, (1, 2)),
    ],
)
def test_an_override_sets_one_value(override: str, read: Any, value: object):
    found = read(load(override))
    assert found == value
    assert type(found) is type(value)


def test_overrides_change_lists_of_the_file_and_win_in_order():
    recipe = load(
        "sinks.0.every=5", "sinks.1.kind=console", "sinks.0.every=6", sinks=[{"kind": "console"}]
    )
    assert recipe.sinks == (Console(every=6), Console())


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    names: tuple[str, ...] = ("a", "b")
    limits: tuple[float | None, ...] = (1.0,)
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    each: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("names.1=7", lambda t: t.names, ("a", "7")),
        ("names.2=true", lambda t: t.names, ("a", "b", "true")),
        ("names.0=none", lambda t: t.names, ("none", "b")),
        ("limits.0=none", lambda t: t.limits, (None,)),
        ("environment.NUM_THREADS=7", lambda t: t.environment, {"NUM_THREADS": "7", "B": "b"}),
        ("each.x.0=7", lambda t: t.each, {"x": ("7", "c")}),
    ],
)
def test_an_override_of_one_element_is_read_as_the_type_of_elements(
    override: str, read: Any, value: object
):
    tables = {"environment": {"B": "b"}, "each": {"x": ["a", "c"]}}
    assert read(load_config(Texts, tables, [override])) == value


def test_an_element_of_the_wrong_type_is_said_as_it_was_given():
    assert complaint("trainer.betas.0=x").endswith('trainer.betas.0 needs a number, found "x"')


def test_overrides_leave_the_given_tables_alone():
    tables = {"model": "m", "trainer": {"steps": 2}, "sinks": [{"kind": "console"}]}
    load_config(Recipe, tables, ["trainer.steps=9", "sinks.0.every=4"])
    assert tables == {"model": "m", "trainer": {"steps": 2}, "sinks": [{"kind": "console"}]}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"trainer": {"lrr": 1}}, "unknown key trainer.lrr; did you mean trainer.lr?"),
        ({"max_len": 1}, "unknown key max_len; did you mean engine.max_len?"),
        (
            {"engine": {"kind": "vllm", "answer": "1"}},
            'unknown key engine.answer; it is a key of kind "scripted"',
        ),
        (
            {"sinks": [{"kind": "console", "colour": 1}]},
            "unknown key sinks.0.colour; known keys here: kind, every",
        ),
        ({"trainer": {"lr": "fast"}}, 'trainer.lr needs a number, found "fast"'),
        ({"trainer": {"lr": "3e-4"}}, 'found "3e-4"; write 3e-4, without quotes'),
        ({"trainer": {"steps": 2.0}}, "trainer.steps needs a whole number, found 2.0"),
        ({"trainer": {"steps": True}}, "trainer.steps needs a whole number, found true"),
        ({"trainer": {"steps": 0}}, "trainer.steps has to be greater than or equal to 1, found 0"),
        ({"trainer": {"resume": "True"}}, 'needs true or false, found "True"; write true, '),
        ({"trainer": {"name": 7}}, 'needs a string or none, found 7; write "7", in quotes'),
        (
            {"trainer": {"dtype": "bf16"}},
            'trainer.dtype needs one of "float32", "bfloat16", found "bf16"; '
            'did you mean "bfloat16"?',
        ),
        (
            {"trainer": {"betas": [0.9]}},
            "trainer.betas needs a list of 2 numbers, found a list of 1",
        ),
        ({"trainer": {"betas": [0.9, "x"]}}, 'trainer.betas.1 needs a number, found "x"'),
        ({"stops": [1, 2.5]}, "stops.1 needs a whole number, found 2.5"),
        ({"stops": 3}, "stops needs a list of whole numbers, found 3"),
        ({"trainer": 3}, "trainer needs a table, found 3"),
        ({"trainer": {"lr": {"x": 1}}}, "trainer.lr needs a number, found a table"),
        ({"sinks": {"kind": "console"}}, "sinks needs a list of tables, found a table"),
        ({"sinks": [{"every": 1}]}, 'missing key sinks.0.kind; one of "console", "file"'),
        ({"engine": {"kind": "vlm"}}, 'engine.kind is "vlm", which is no known kind; did you mean'),
        ({"engine": {"kind": 3}}, 'is no known kind; one of "vllm", "scripted"'),
        ({"trainer": {"lr": -1}}, "trainer: lr has to be positive, found -1.0"),
        ({"seed": 101, "trainer": {"resume": True}}, "a run with a seed above 100 cannot resume"),
        ({"engine": {"extra": 3}}, "engine.extra needs a table, found 3"),
        (
            {"engine": {"limits": {"a": {"b": 1}}}},
            "engine.limits.a needs a whole number or a string, found a table",
        ),
        ({"rewards": {"exact": 3}}, "rewards.exact needs a table, found 3"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(tables: dict[str, Any], message: str):
    assert message in complaint(**tables)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.lr", "override 'trainer.lr' is not of the form path=value"),
        ("=3", "not of the form path=value"),
        ("trainer..lr=3", "not of the form path=value"),
        (
            "trainer.lrr=3",
            "override trainer.lrr=3: unknown key trainer.lrr; did you mean trainer.lr?",
        ),
        ("trainer.steps=many", 'trainer.steps needs a whole number, found "many"'),
        ("trainer.resume=True", 'found "True"; write true, without quotes'),
        ("sinks.4.kind=file", "sinks.4 does not exist; sinks has 2 elements"),
        ("sinks.999999999999.kind=file", "sinks.999999999999 does not exist; sinks has 2 elements"),
        ("seed.0=1", "seed needs a whole number, it has no elements"),
        ("seed=none", 'seed needs a whole number, found "none"'),
        ("engine.kind=vlm", 'engine.kind is "vlm"'),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str):
    assert message in complaint(override)


def test_an_override_inside_of_what_an_earlier_one_gave_leaves_the_rest_of_it():
    recipe = load("trainer={steps=4, lr=0.5}", "trainer.lr=0.25", "stops=[1, 2]", "stops.1=5")
    assert recipe.trainer == Trainer(lr=0.25, name="slow", steps=4)
    assert recipe.stops == (1, 5)
    assert load("engine={kind='scripted'}", "engine.answer=7").engine == Scripted(answer="7")


def test_what_does_not_go_together_is_laid_to_an_override_that_is_spoken_of():
    refused = complaint("trainer.lr=-1.0", "trainer.steps=4")
    assert "override trainer.lr=-1.0: trainer: lr has to be positive" in refused
    assert "override" not in complaint("trainer.steps=4", trainer={"lr": -1.0})


def test_an_element_beyond_the_list_of_the_file_is_refused():
    message = complaint("sinks.3.kind=file", sinks=[{"kind": "console"}])
    assert "sinks.3.kind: the list has 1 elements, counted from 0" in message


def test_a_missing_key_says_what_it_is_for():
    with pytest.raises(ConfigError) as caught:
        load_config(Recipe, {})
    (problem,) = caught.value.problems
    assert (problem.path, problem.hint) == ("model", "where the model is")
    assert str(problem) == "missing key model (a path); where the model is"


def test_all_problems_are_told_at_once_with_their_lines(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "sede = 1  # line 1\n"
        "[trainer]\n"
        'lr = "high"\n'
        "\n"
        "[[sinks]]\n"
        'kind = "console"\n'
        "[[sinks]]\n"
        'kind = "file"\n'
        "every = 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(Recipe, recipe, ["stops=x"])
    assert [(problem.path, problem.source) for problem in caught.value.problems] == [
        ("sede", f"{recipe}:1"),
        ("model", str(recipe)),  # nowhere to point at
        ("trainer.lr", f"{recipe}:3"),
        ("sinks.1.every", f"{recipe}:9"),
        ("stops", "override stops=x"),
    ]
    assert str(caught.value).startswith("5 problems in the configuration\n")


def test_a_file_that_is_not_there_suggests_its_neighbour(tmp_path: Path):
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(ConfigError, match=r"there is no file .*; did you mean .*quickstart\.toml"):
        load_config(Recipe, tmp_path / "quikstart.toml")


def test_broken_toml_says_where(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("model = \n")
    with pytest.raises(ConfigError, match=r"recipe\.toml: not TOML: .*line 1"):
        load_config(Recipe, recipe)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "found a list")])
def test_broken_json_is_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        config_from_json(Recipe, text)


@pytest.mark.parametrize(
    "override", ["trainer.clip=nan", "trainer.lr=-nan", "trainer.betas=[0.9,nan]"]
)
def test_nan_is_no_number_of_a_recipe(override: str):
    path = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{path} has to be a number, found nan"):
        load(override)


def test_a_path_with_a_nul_is_none():
    with pytest.raises(ConfigError, match=r"is no path: .* has a NUL in it"):
        load('model="a\\u0000b"')


def test_the_resolved_config_runs_again_from_its_json_file(tmp_path: Path):
    recipe = load("trainer.clip=inf", "trainer.name=none", "judge.max_len=3", "sinks.0.every=9")
    resolved = tmp_path / "config.json"
    resolved.write_text(config_to_json(recipe))
    assert load_config(Recipe, resolved) == recipe
    assert load_config(Recipe, resolved, ["seed=4"]).seed == 4


recipes = st.builds(
    Recipe,
    model=st.text("ab/.", min_size=1).map(Path),
    seed=st.integers(-(2**60), 100),
    trainer=st.builds(
        Trainer,
        lr=st.floats(1e-9, 1e9),
        steps=st.integers(1, 5),
        clip=st.none() | st.floats(allow_nan=False),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        name=st.none() | st.text(),
    ),
    engine=st.builds(Vllm, extra=st.dictionaries(st.text(), st.integers() | st.text()))
    | st.builds(Scripted, answer=st.text()),
    sinks=st.lists(st.builds(Console) | st.builds(File)).map(tuple),
    rewards=st.dictionaries(st.text(), st.builds(Scripted, answer=st.text()), max_size=2),
    judge=st.none() | st.just(Vllm()),
    stops=st.lists(st.integers()).map(tuple),
)


@given(recipes)
def test_json_and_back_is_equal(recipe: Recipe):
    assert config_from_json(Recipe, config_to_json(recipe)) == recipe


def test_every_key_is_described_with_type_default_and_meaning():
    docs = {field.path: field for field in describe_config(Recipe) if not field.when}
    assert docs["model"].required
    assert docs["model"].doc == "where the model is."
    rate = docs["trainer.lr"]
    assert (rate.type, rate.default) == ("a number", "0.0003")
    assert rate.doc == "learning rate of the first group of parameters."
    assert docs["trainer.betas"].default == "[0.9, 0.95]"
    assert docs["trainer.clip"].type == "a number or none"
    assert docs["rewards.NAME.answer"].default == '""'


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (tuple[int, ...], "a list of whole numbers"),
        (list[Path], "a list of paths"),
        (tuple[float, float], "a list of 2 numbers"),
        (tuple[str, float], "a list of 2 (a string, a number)"),
        (tuple[Literal["a", "b"], ...], 'a list of values, each one of "a", "b"'),
        (int | Literal["auto"] | None, 'a whole number or "auto" or none'),
        (Annotated[int, Field(ge=1)], "a whole number"),
        (Mapping[str, int], "a table"),
        (Console | File | None, "a table or none"),
    ],
)
def test_types_are_said_in_words(annotation: Any, words: str):
    assert in_words(annotation) == words


def test_keys_of_one_kind_say_so():
    docs = [field for field in describe_config(Recipe) if field.path == "engine.max_len"]
    assert [(field.when, field.default) for field in docs] == [('engine.kind = "vllm"', "64")]
    elements = {field.path: field.when for field in describe_config(Recipe) if "N." in field.path}
    assert elements["sinks.N.every"] == 'sinks.N.kind = "console"'


_keys = st.sampled_from([
    "model", "trainer", "engine", "sinks", "rewards", "judge", "stops", "kind", "lr", "betas",
    "max_len", "extra", "0", "1", "", "none", "x y",
])  # fmt: skip
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["vllm", "scripted", "file", "bfloat16", "1", "none"])
    | st.dates()
    | st.builds(object),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(_keys, _values, max_size=4),
    st.lists(
        st.builds(
            lambda path, value: f"{'.'.join(path)}={value}",
            st.lists(_keys, min_size=1, max_size=3),
            st.text("[]{}=\"'.,0123 truenoae\n-_", max_size=8),
        ),
        max_size=2,
    ),
)
def test_whatever_is_given_the_answer_is_a_config_or_a_config_error(tables, overrides):
    try:
        outcome: object = load_config(Recipe, tables, overrides)
    except ConfigError as error:
        outcome = error.problems[0]
    assert isinstance(outcome, (Recipe, ConfigProblem))
