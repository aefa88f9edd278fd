"""What config classes say of themselves: tables, keys and a schema."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from cosmos_core.config import describe_table, json_schema


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """Plain descent,
    without moments.

    Attributes:
        kind: which optimizer.
        lr: size of a step.
    """

    kind: Literal["sgd"] = "sgd"
    lr: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Two moments.

    Attributes:
        betas: their decay.
    """

    kind: Literal["adam"] = "adam"
    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sink:
    """A place for figures."""

    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Steps, one after another.

    Attributes:
        steps: how many.
        optimizer: the rule.
        sinks: where figures go.
        named: the same, by name.
        limit: none, or seconds.
    """

    steps: int
    optimizer: Sgd | Adam = field(default_factory=lambda: Adam(lr=0.5))
    sinks: tuple[Sink, ...] = ()
    named: dict[str, Sink | Sgd] = field(default_factory=dict[str, Sink | Sgd])
    limit: float | None = float("inf")


def test_a_table_of_several_kinds_is_told_by_kind_with_the_defaults_of_its_place():
    sgd, adam = describe_table(Loop, "optimizer")
    assert (sgd.path, sgd.kind, sgd.is_default) == ("optimizer", "sgd", False)
    assert sgd.doc == "Plain descent, without moments."
    assert (adam.kind, adam.is_default) == ("adam", True)
    assert {key.path: key.default for key in adam.keys} == {
        "optimizer.lr": "0.5",
        "optimizer.betas": "[0.9, 0.999]",
    }


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("optimizer.sgd", ["sgd"]),
        ("sinks", [""]),
        ("sinks.N", [""]),
        ("named", ["", "sgd"]),
        ("named.NAME.sgd", ["sgd"]),
        ("steps", []),
        ("optimizer.rmsprop", []),
    ],
)
def test_kinds_and_elements_are_steps_of_a_path(path: str, kinds: list[str]):
    assert [table.kind for table in describe_table(Loop, path)] == kinds


def _resolved(schema: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][place["$ref"].removeprefix("#/$defs/")]


def test_a_schema_has_types_texts_and_defaults_and_no_other_keys():
    schema = json_schema(Loop)
    assert schema["required"] == ["steps"]
    loop = _resolved(schema, schema)
    assert loop["additionalProperties"] is False
    assert loop["properties"]["steps"] == {"type": "integer", "description": "how many."}
    limit = loop["properties"]["limit"]
    assert limit["type"] == "number"  # TOML cannot say none
    assert "default" not in limit  # nor JSON infinity
    assert _resolved(schema, loop["properties"]["sinks"]["items"])["properties"]["path"] == {
        "type": "string",
        "format": "path",
    }
    assert loop["properties"]["sinks"]["items"]["required"] == ["path"]


def test_a_kind_has_to_be_given_where_it_is_not_the_default_one():
    schema = json_schema(Loop)
    sgd, adam = _resolved(schema, schema)["properties"]["optimizer"]["anyOf"]
    assert sgd["required"] == ["kind"]
    assert "required" not in adam
    by_name = _resolved(schema, schema)["properties"]["named"]["additionalProperties"]["anyOf"]
    assert [one["required"] for one in by_name] == [["path"], ["kind"]]
