"""What a config says besides its defaults, as overrides that give the same config."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cosmos_core.config import changed_keys, count_keys, load_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One shape."""

    kind: Literal["constant"] = "constant"
    warmup: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine:
    """Another shape."""

    kind: Literal["cosine"] = "cosine"
    warmup: int = 0
    final: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """A table that is there or not."""

    decay: float = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """A table whose default in the root is not that of its class."""

    steps: int = 10
    schedule: Constant | Cosine = Constant()
    average: Average | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """A config with a key that has to be given, tables, a list of tables and a list of numbers."""

    path: Path
    limit: int | None = None
    betas: tuple[float, ...] = (0.9, 0.95)
    trainer: Trainer = field(default_factory=lambda: Trainer(steps=20))
    shapes: tuple[Constant | Cosine, ...] = (Constant(),)


def test_a_config_without_a_word_has_only_what_must_be_given() -> None:
    assert changed_keys(load_config(Root, {"path": "x"})) == ["path"]


def test_values_that_differ_are_told_wherever_they_are() -> None:
    given = [
        "path=x",
        "limit=3",
        "betas=[0.9, 0.9]",
        "trainer.steps=9",
        "trainer.schedule.warmup=2",
    ]
    keys = ["path", "limit", "betas", "trainer.steps", "trainer.schedule.warmup"]
    assert changed_keys(load_config(Root, {}, given)) == keys


def test_a_table_of_another_kind_is_held_against_its_own_class() -> None:
    given = {"path": "x", "trainer": {"steps": 20, "schedule": {"kind": "cosine", "final": 0.1}}}
    keys = ["path", "trainer.schedule.kind", "trainer.schedule.final"]
    assert changed_keys(load_config(Root, given)) == keys


def test_a_table_that_is_none_by_default_is_told_whole() -> None:
    given = {"path": "x", "trainer": {"steps": 20, "average": {}}}
    assert changed_keys(load_config(Root, given)) == ["path", "trainer.average.decay"]


def test_elements_of_a_list_of_tables_are_told_one_by_one() -> None:
    given = {"path": "x", "shapes": [{"kind": "constant"}, {"kind": "cosine", "warmup": 5}]}
    keys = ["path", "shapes.0.kind", "shapes.1.kind", "shapes.1.warmup"]
    assert changed_keys(load_config(Root, given)) == keys
    assert changed_keys(load_config(Root, {"path": "x", "shapes": []})) == ["path", "shapes"]


def test_keys_are_counted_with_those_of_tables_and_of_elements() -> None:
    config = load_config(Root, {"path": "x", "shapes": [{"kind": "cosine"}, {"kind": "constant"}]})
    assert count_keys(config) == 3 + (1 + 2 + 1) + (3 + 2)
