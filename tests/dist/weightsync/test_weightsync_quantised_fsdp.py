"""Quantised weights are the same bytes however many ranks hold the model."""

import pytest
import torch

from cosmos_weightsync import Box, ShardSpec, WeightReceiver

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def publish(start, tmp_path_factory):
    """Answers of all ranks of a trainer that has published version 1."""

    def ranks(num_ranks: int, height: int):
        store = str(tmp_path_factory.mktemp("quantised") / "store")
        setup = {"num_ranks": num_ranks, "height": height, "store": store}
        started = [start("quantising_process.py", {**setup, "rank": r}) for r in range(num_ranks)]
        return [process.answer() for process in started]

    return ranks


def staged(answers, wanted=None) -> dict[str, list]:
    endpoints = [answer["endpoint"] for answer in answers]
    with WeightReceiver(endpoints, wanted=wanted) as receiver:
        receiver.stage(1, timeout_s=60)
        return {
            s.spec.name: s.tensor.view(-1).view(torch.uint8).tolist()
            for s in receiver.staged_shards()
        }


@pytest.fixture(scope="module")
def alone(publish):
    return {height: publish(1, height) for height in (512, 500)}


@pytest.mark.parametrize(
    ("num_ranks", "height"),
    [(2, 512), (4, 512), (2, 500), (4, 500)],
    ids=["2 aligned", "4 aligned", "2 cut", "4 cut"],
)
def test_shards_give_the_bytes_of_one_rank(publish, alone, num_ranks, height):
    answers = publish(num_ranks, height)
    found, wanted = staged(answers), staged(alone[height])
    assert found.keys() == wanted.keys()
    assert {name for name in found if "scale" in name} == {
        "block_scale_inv",
        "row_scale",
        "mx_scale",
        "fp4_scale",
        "fp4_scale_2",
    }
    for name, content in wanted.items():
        assert found[name] == content, name


def test_a_receiver_of_half_the_rows_takes_half_of_the_scales(publish, alone):
    half = [
        ShardSpec("block", (512, 192), Box((256, 0), (512, 192)), "float8_e4m3fn"),
        ShardSpec("block_scale_inv", (4, 2), Box((2, 0), (4, 2)), "float32"),
    ]
    found, whole = staged(publish(2, 512), half), staged(alone[512])
    assert found["block"] == whole["block"][256 * 192 :]
    assert found["block_scale_inv"] == whole["block_scale_inv"][4 * 4 :]


def test_a_bad_value_on_one_rank_fails_the_publish_on_every_rank(publish):
    answers = publish(2, 500)
    assert "another rank" in answers[0]["error"]
    assert answers[1]["error"].startswith("block [384:500, 0:128]")
    assert [answer["newest"] for answer in answers] == [1, 1]
    assert staged(answers)["row_scale"]
