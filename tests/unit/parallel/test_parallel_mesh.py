"""Degrees of parallelism, and the errors for impossible ones."""

import socket

import pytest
import torch

from cosmos_parallel import (
    MeshError,
    ParallelConfig,
    ParallelError,
    ProcessContext,
    TrainingMesh,
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
        (ParallelConfig(tp=2), 6, (1, 3)),
        (ParallelConfig(tp=2, cp=2, pp=2, dp_replicate=2), 16, (2, 1)),
        # experts take ranks that the other axes have already
        (ParallelConfig(tp=2, ep=4), 8, (1, 4)),
        (ParallelConfig(cp=2, tp=2, dp_shard=1, ep=4), 4, (1, 1)),
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
        (ParallelConfig(tp=2, cp=4), 12, r"12 ranks cannot be divided by cp 4 x tp 2; each"),
        (ParallelConfig(dp_shard=2, pp=3), 8, "pp 3 x dp_shard 2 makes 6 ranks"),
        (ParallelConfig(dp_replicate=2, ep=4), 4, r"ep 4 does not divide dp_shard 2 x .* \[1, 2\]"),
        # stages hold different layers, so they cannot lend ranks to the experts of one layer
        (
            ParallelConfig(pp=4, ep=2),
            4,
            r"= 1, the ranks it is taken from; it must be one of \[1\]",
        ),
    ],
)
def test_degrees_that_do_not_multiply_to_the_ranks_are_refused(config, world_size, message):
    with pytest.raises(MeshError, match=message):
        config.resolve(world_size)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": -1}, "tp is -1; it must be 1 or more"),
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


def test_an_address_of_another_machine_is_named():
    with pytest.raises(ParallelError, match="which has to be an address of this machine"):
        open_store("192.0.2.1", 0, hosting=True)


def test_a_store_listens_on_its_address_alone():
    store = open_store("127.0.0.1", 0, hosting=True)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=10)


def test_a_store_may_have_a_name_and_a_port_that_are_told():
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    store = open_store("localhost", port, hosting=True)
    open_store("localhost", port, hosting=False, timeout_s=10).set("key", "value")
    assert (store.port, store.get("key")) == (port, b"value")


def test_an_absent_store_is_named():
    store = open_store("127.0.0.1", 0, hosting=True)
    port = store.port
    del store
    with pytest.raises(ParallelError, match=f"cannot reach the store at 127.0.0.1:{port}"):
        open_store("127.0.0.1", port, hosting=False, timeout_s=1)


@pytest.mark.parametrize(
    ("config", "world_size", "data_ranks"),
    [
        (ParallelConfig(), 4, [0, 1, 2, 3]),
        (ParallelConfig(tp=2), 4, [0, 0, 1, 1]),
        (ParallelConfig(cp=2, dp_replicate=2), 4, [0, 0, 1, 1]),
        (ParallelConfig(cp=2, tp=2), 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        # stages are outermost
        (ParallelConfig(pp=2), 4, [0, 1, 0, 1]),
        (ParallelConfig(pp=2, tp=2), 8, [0, 0, 1, 1, 0, 0, 1, 1]),
        (ParallelConfig(pp=4), 4, [0, 0, 0, 0]),
        (ParallelConfig(ep=2), 4, [0, 1, 2, 3]),
    ],
)
def test_ranks_of_one_copy_of_the_model_have_the_same_samples(config, world_size, data_ranks):
    resolved = config.resolve(world_size)
    meshes = [
        TrainingMesh(resolved, ProcessContext(rank=rank, world_size=world_size), None)
        for rank in range(world_size)
    ]
    assert [mesh.data_rank for mesh in meshes] == data_ranks
    assert {mesh.data_size for mesh in meshes} == {max(data_ranks) + 1}


@pytest.mark.parametrize(
    ("config", "num_stages"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(pp=2), 2),
        (ParallelConfig(pp=2, pp_schedule="Interleaved1F1B"), 4),
        (ParallelConfig(pp_schedule="ZBVZeroBubble"), 1),
    ],
)
def test_schedules_other_than_1f1b_give_a_rank_two_stages(config, num_stages):
    assert config.num_stages == num_stages
