"""Models that count tokens of pictures as text compute the same where ranks share rows."""

import json
from pathlib import Path

import pytest
import torch
from process_trees import found_by_ranks
from seeing_in_order import FAMILIES

RANKS = Path(__file__).with_name("divided_pictures.py")
PARALLEL = (2, 4)
# three pictures, or nine tiles of them; with four ranks one looks at the first again, for nothing
SHARES = {"pictures": {1: [3], 2: [1, 2], 4: [1, 1, 1, 1]}, "tiles": {1: [9], 2: [4, 5]}}
SHARED = {
    "llava": "pictures",
    "vipllava": "pictures",
    "llava_next": "tiles",
    "llava_onevision": "tiles",
    "gemma3": "pictures",
    "internvl": "pictures",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """Return what one process found, by 1, and each rank of several."""
    directory = tmp_path_factory.mktemp("pictures")
    given = json.dumps(FAMILIES)
    return found_by_ranks(RANKS, directory, PARALLEL, deadline_s=280, given=given)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_ranks", PARALLEL)
def test_logits_and_gradients_are_those_of_one_process(found, num_ranks, family):
    whole = found[1][0][family]
    assert any("vision" in name for name in whole["gradients"])
    size = float(torch.stack([each.norm() for each in whole["gradients"].values()]).norm())
    largest = float(whole["logits"].abs().max())
    for rank in found[num_ranks]:
        divided = rank[family]
        torch.testing.assert_close(divided["logits"], whole["logits"], rtol=0, atol=1e-5 * largest)
        assert divided["gradients"].keys() == whole["gradients"].keys()
        for name, expected in whole["gradients"].items():
            off = float((divided["gradients"][name] - expected).norm())
            assert off <= 1e-4 * float(expected.norm()) + 1e-6 * size, f"{name}: {off}"


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARED)
def test_a_rank_looks_at_its_share_where_pictures_are_of_one_shape(found, family):
    for num_ranks, expected in SHARES[SHARED[family]].items():
        looked_at = [rank[family]["looked_at"] for rank in found[num_ranks]]
        assert looked_at == [[number] for number in expected]
