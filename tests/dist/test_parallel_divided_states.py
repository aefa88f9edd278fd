"""A state that goes on from one rank's stretch of a row to the next is that of the whole row."""

import json
from pathlib import Path

import pytest
import torch
from process_trees import found_by_ranks

RANKS = Path(__file__).with_name("divided_state_ranks.py")
PARALLEL = (2, 4)
# by name: the length of rows, and where samples begin in each
CASES = {
    "one sample a row": (24, [[0], [0]]),
    "samples begin within stretches": (24, [[0, 3, 8, 15], [0, 17]]),
    "samples begin where stretches do": (24, [[0, 12], [0, 6, 18]]),
    "and one token off": (24, [[0, 11, 13], [0, 5, 7, 19], [0, 23]]),
    "one over three stretches": (24, [[0, 5, 19], [0, 4, 5]]),
    "stretches shorter than a convolution reaches": (8, [[0], [0, 1], [0, 3, 6]]),
    "stretches of several chunks": (400, [[0], [0, 90, 250]]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """Return what one process found, by 1, and each rank of several."""
    directory = tmp_path_factory.mktemp("states")
    given = json.dumps(CASES)
    return found_by_ranks(RANKS, directory, PARALLEL, deadline_s=200, given=given)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", PARALLEL)
def test_outputs_and_gradients_are_those_of_one_process(found, num_ranks, name):
    expected, parts = found[1][0][name], [rank[name] for rank in found[num_ranks]]
    exact = {"rtol": 1e-9, "atol": 1e-11}
    output = torch.cat([part["output"] for part in parts], dim=1)
    torch.testing.assert_close(output, expected["output"], **exact)
    gradients = list(zip(*(part["gradients"] for part in parts), strict=True))
    for mine, theirs in zip(gradients[:5], expected["gradients"][:5], strict=True):
        torch.testing.assert_close(torch.cat(mine, dim=1), theirs, **exact)
    for mine, theirs in zip(gradients[5:], expected["gradients"][5:], strict=True):
        # the weights of a convolution: ranks are summed by who shards them
        torch.testing.assert_close(torch.stack(mine).sum(0), theirs, **exact)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", PARALLEL)
def test_a_rank_keeps_its_share_for_the_backward_pass(found, num_ranks):
    name = "stretches of several chunks"
    whole = found[1][0][name]["kept_bytes"]
    for rank in found[num_ranks]:
        # what is asked of the state that comes in is kept besides
        assert rank[name]["kept_bytes"] < 1.3 * whole / num_ranks
