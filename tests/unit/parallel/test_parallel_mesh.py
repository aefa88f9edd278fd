"""Degrees of parallelism, and the errors for impossible ones."""

import pytest
import torch

from cosmos_parallel import (
    MeshError,
    ParallelConfig,
    ParallelError,
    ProcessContext,
    build_mesh,
    init_distributed,
    open_store,
)


@pytest.mark.parametrize(
    ("config", "world_size", "degrees"),
    [
        (ParallelConfig(), 1, (1, 1)),
        (ParallelConfig(), 6, (1, 6)),
        (ParallelConfig(dp_replicate=2), 6, (2, 3)),
        (ParallelConfig(dp_replicate=2, dp_shard=2), 4, (2, 2)),
        (ParallelConfig(dp_replicate=4), 4, (4, 1)),
    ],
)
def test_shard_takes_the_ranks_that_are_left(config, world_size, degrees):
    resolved = config.resolve(world_size)
    assert (resolved.dp_replicate, resolved.dp_shard) == degrees


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (ParallelConfig(dp_replicate=4), 6, r"6 ranks .* must be one of \[1, 2, 3, 6\]"),
        (ParallelConfig(dp_shard=4), 6, "makes 4 ranks, but the replica has 6"),
        (ParallelConfig(dp_replicate=2, dp_shard=2), 2, "makes 4 ranks, but the replica has 2"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_ranks_are_refused(config, world_size, message):
    with pytest.raises(MeshError, match=message):
        config.resolve(world_size)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 2}, "tp is 2; this version"),
        ({"ep": 0}, "ep is 0; it must be 1 or more"),
        ({"dp_shard": -2}, "dp_shard is -2; it must be 1 or more, or -1"),
        ({"dp_replicate": 0}, "dp_replicate is 0"),
    ],
)
def test_degrees_out_of_range_are_refused_at_once(degrees, message):
    with pytest.raises(MeshError, match=message):
        ParallelConfig(**degrees)


def test_a_process_by_itself_is_a_mesh_where_sums_change_nothing():
    mesh = build_mesh(ParallelConfig())
    assert not mesh.is_distributed
    assert (mesh.data_rank, mesh.data_size) == (0, 1)
    assert mesh.sum_(torch.tensor(3.0)).item() == 3.0
    with pytest.raises(MeshError, match="by itself"):
        _ = mesh.fsdp_mesh


def test_several_ranks_need_a_process_group():
    with pytest.raises(MeshError, match="call init_distributed first"):
        build_mesh(ParallelConfig(), ProcessContext(rank=0, world_size=2))


@pytest.mark.parametrize("meeting", [{}, {"store": object(), "init_method": "file:///x"}])
def test_ranks_meet_in_one_place(meeting):
    with pytest.raises(ParallelError, match="a store or an init_method"):
        init_distributed(0, 1, **meeting)


def test_a_busy_port_is_named():
    first = open_store("127.0.0.1", 0, hosting=True)
    with pytest.raises(ParallelError, match=f"cannot host the store at 127.0.0.1:{first.port}"):
        open_store("127.0.0.1", first.port, hosting=True, timeout_s=2)


def test_an_absent_store_is_named():
    store = open_store("127.0.0.1", 0, hosting=True)
    port = store.port
    del store
    with pytest.raises(ParallelError, match=f"cannot reach the store at 127.0.0.1:{port}"):
        open_store("127.0.0.1", port, hosting=False, timeout_s=1)
