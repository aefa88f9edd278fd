"""Quantised weights are the same bytes however many ranks hold the model."""

import pytest
import torch

from cosmos_weightsync import Box, ShardSpec, WeightReceiver

pytestmark = pytest.mark.slow

HEIGHTS = (512, 500)
"""Rows of every matrix: two and four ranks cut none of the blocks, or several."""


@pytest.fixture(scope="module")
def trainers(start, tmp_path_factory):
    """What the ranks of trainers of 1, 2 and 4 ranks say; all have published version 1."""
    started = {}
    for num_ranks in (1, 2, 4):
        store = str(tmp_path_factory.mktemp("quantised") / "store")
        setup = {"num_ranks": num_ranks, "heights": HEIGHTS, "store": store}
        started[num_ranks] = [
            start("quantising_process.py", {**setup, "rank": rank}) for rank in range(num_ranks)
        ]
    return {size: [rank.answer() for rank in ranks] for size, ranks in started.items()}


def staged(answers, height: int, wanted=None) -> dict[str, list[int]]:
    endpoints = [answer["endpoints"][HEIGHTS.index(height)] for answer in answers]
    with WeightReceiver(endpoints, wanted=wanted) as receiver:
        receiver.stage(1, timeout_s=60)
        shards = receiver.staged_shards()
        return {s.spec.name: s.tensor.view(-1).view(torch.uint8).tolist() for s in shards}


@pytest.mark.parametrize("height", HEIGHTS, ids=["aligned", "cut"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_give_the_bytes_of_one_rank(trainers, num_ranks, height):
    found, wanted = staged(trainers[num_ranks], height), staged(trainers[1], height)
    assert found.keys() == wanted.keys()
    scales = {"block_scale_inv", "row_scale", "mx_scale", "fp4_scale", "fp4_scale_2"}
    scales |= {"fp4_up_scale", "fp4_up_scale_2"}
    assert found["fp4_scale_2"] == found["fp4_up_scale_2"]
    assert {name for name in found if "scale" in name} == scales
    for name, content in wanted.items():
        assert found[name] == content, name


def test_a_receiver_of_half_the_rows_takes_half_of_the_scales(trainers):
    half = [
        ShardSpec("block", (512, 192), Box((256, 0), (512, 192)), "float8_e4m3fn"),
        ShardSpec("block_scale_inv", (4, 2), Box((2, 0), (4, 2)), "float32"),
    ]
    found, whole = staged(trainers[2], 512, half), staged(trainers[1], 512)
    assert found["block"] == whole["block"][256 * 192 :]
    assert found["block_scale_inv"] == whole["block_scale_inv"][4 * 4 :]


def test_a_bad_value_on_one_rank_fails_the_publish_on_every_rank(trainers):
    first, last = trainers[2]
    assert "another rank" in first["errors"][1]
    assert last["errors"][1].startswith("block [384:500, 0:128]")
    assert staged(trainers[2], 500)["row_scale"]  # Version 1 is still there.
