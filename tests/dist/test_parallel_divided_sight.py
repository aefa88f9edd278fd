"""Models that see, whose sequences or layers several ranks share, compute what whole ones do."""

from pathlib import Path

import pytest
import torch
from capabilities import needs
from process_trees import run_tree
from seeing import (
    FAMILIES,
    can_cut_pictures,
    seeing_environment,
    write_seeing_world,
)

from cosmos_parallel.context_sight import divide_frames

RANKS = Path(__file__).with_name("divided_sight.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("sight")
    write_seeing_world(directory)
    run_tree(RANKS, directory, deadline_s=300, environment=seeing_environment())
    return {how: torch.load(directory / f"{how}.pt") for how in ("whole", "cp", "tp")}


@pytest.mark.slow
@needs("torchvision", can_cut_pictures())
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_logits_and_gradients_are_those_of_one_rank(found, axis, kind, layout):
    whole, divided = (found[how][kind, layout] for how in ("whole", axis))
    torch.testing.assert_close(divided["logits"], whole["logits"], rtol=0, atol=2e-5)
    assert divided["gradients"].keys() == whole["gradients"].keys()
    assert any(".visual." in name for name in whole["gradients"])
    gradients = whole["gradients"]
    size = float(torch.stack([each.norm() for each in gradients.values()]).norm())
    for name, expected in gradients.items():
        off = float((divided["gradients"][name] - expected).norm())
        assert off <= 1e-4 * float(expected.norm()) + 1e-6 * size, f"{name}: {off}"


@pytest.mark.parametrize(
    ("grids", "num_parts", "patches"),
    [
        ([[1, 4, 4]], 1, [16]),
        ([[4, 2, 2]], 2, [8, 8]),
        ([[1, 2, 2], [1, 4, 4], [2, 2, 2]], 3, [4, 16, 8]),
        # two frames for four ranks: the others look at the first, for nothing
        ([[2, 2, 2]], 4, [0, 4, 0, 4]),
        # a large picture between small ones keeps to itself
        ([[1, 2, 2], [1, 8, 8], [1, 2, 2]], 2, [4, 64 + 4]),
    ],
)
def test_frames_are_divided_by_their_patches(grids, num_parts, patches):
    parts = divide_frames(torch.tensor(grids), num_parts)
    assert [part.num_patches if part.counts else 0 for part in parts] == patches
    end = 0
    for part in parts:
        assert part.num_patches == int(part.grids.prod(1).sum()) > 0
        assert part.first == (end if part.counts else 0)
        end += part.num_patches if part.counts else 0
    assert end == sum(t * h * w for t, h, w in grids)
