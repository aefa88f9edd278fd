"""A run says that its engine serves another model than is trained, once, and of no other reason."""

import pytest

from cosmos_app.agreement import Agreement
from cosmos_app.recipe import Recipe, load_recipe
from cosmos_core.metrics import MetricRecord


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.toml").write_text("seed = 1\n")
    return lambda *overrides: load_recipe(tmp_path / "recipe.toml", list(overrides))


def measured(step: int, *, tokens: float = 4000.0, share: float = 1.0, distance: float = 0.6):
    values = {"tokens": tokens, "lag0_tokens": share, "lag0_abs": distance, "mismatch_abs": 2.0}
    return MetricRecord(time_s=1.0, role="policy", replica="policy-0", step=step, values=values)


def said_of(recipe: Recipe, *records: MetricRecord) -> list[str]:
    said: list[str] = []
    agreement = Agreement(recipe, said.append)
    for record in records:
        agreement.look(record)
    return said


def test_another_model_in_the_engine_is_told_once(recipe):
    (line,) = said_of(recipe(), measured(0), measured(1), measured(2))
    assert "step 1: policy and engine (vllm) have the same weights" in line
    assert "0.6 apart" in line
    assert "rollout.engine.kind=transformers" in line


def test_a_run_that_goes_astray_later_is_told_too(recipe):
    (line,) = said_of(recipe(), measured(0, distance=0.02), measured(1))
    assert "step 2" in line


@pytest.mark.parametrize(
    ("overrides", "distance"),
    [
        ([], 0.05),  # rounding
        (["rollout.sampling.top_p=0.7"], 0.4),  # engines tell log-probs within the nucleus
        (["weight_sync.quantised=fp8"], 0.2),
    ],
)
def test_what_has_a_reason_is_not_told(recipe, overrides, distance):
    assert not said_of(recipe(*overrides), measured(0, distance=distance))
    assert said_of(recipe(*overrides), measured(0, distance=distance + 0.3))


def test_few_tokens_say_nothing_until_there_are_more(recipe):
    few = [measured(step, tokens=400.0, share=0.1) for step in range(6)]
    assert not said_of(recipe(), *few[:2])
    assert len(said_of(recipe(), *few)) == 1


def test_records_of_others_and_of_stale_tokens_alone_say_nothing(recipe):
    other = MetricRecord(time_s=1.0, role="rollout", replica="r", step=0, values={"lag0_abs": 9.0})
    stale = measured(0).values | {"lag0_tokens": 0.0}
    stale = {name: value for name, value in stale.items() if name != "lag0_abs"}
    late = MetricRecord(time_s=1.0, role="policy", replica="policy-0", step=0, values=stale)
    assert not said_of(recipe(), other, late)
