"""A policy with a critic dies between the updates of a step, another joins: nothing is changed.

CI runs ranks that share parameters; ``--parallel-axes all`` stages of a pipeline too.
"""

from pathlib import Path

import pytest
import torch
from process_trees import run_tree

pytest.importorskip("torchft")
SCRIPT = Path(__file__).with_name("elastic_critic.py")
DIED_AT, NUM_RANKS = 2, 2


def pytest_generate_tests(metafunc):
    has_all = metafunc.config.getoption("--parallel-axes") == "all"
    metafunc.parametrize("layout", ["shards", "stages"] if has_all else ["shards"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_updates_before_a_death_are_undone_and_the_step_is_taken_again(
    tmp_path: Path, layout: str
) -> None:
    """Weights, critic, momentum, average, reference: those of a policy that was always alone."""
    place = tmp_path / layout
    place.mkdir()
    run_tree(SCRIPT, place, NUM_RANKS, deadline_s=300, environment={"RUST_LOG": "error"})
    last, void, survivor = torch.load(place / "policy-1.pt")
    assert DIED_AT in void
    its_last, _, joiner = torch.load(place / "policy-2.pt")
    assert its_last == last
    _, _, expected = torch.load(place / "fixed.pt")
    assert survivor.keys() == joiner.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(survivor[name], joiner[name]), name
        torch.testing.assert_close(survivor[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert any(name.startswith("companion.") for name in expected)
    assert expected["num_updates"] == 2 * last
    for name in ("model", "ema", "optimizer"):
        found = [v for key, v in expected.items() if key.startswith(f"{name}.value_head.")]
        assert found, name
        assert all(value.abs().max() > 1e-3 for value in found), name
