"""Writing and reading a sharded state dict with torch.distributed.checkpoint.

With a process group this is ``dcp.save`` and ``dcp.load``. A process by itself goes through the
same planners and files, without the warning that those give when there is no group.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cosmos_parallel.errors import CheckpointError
from cosmos_parallel.interleaved import by_pieces

# Any: values are tensors, numbers, strings and dicts of them, as torch.distributed.checkpoint says
State = dict[str, Any]


def write_state(state: State, writer: FileSystemWriter, group: dist.ProcessGroup | None) -> None:
    """Write ``state``; every rank of the group calls.

    Raises:
        CheckpointError: on every rank of a group, if one could not.
    """
    state = by_pieces(state)
    if group is not None:
        with _naming_ranks():
            save(state, storage_writer=writer, process_group=group)
        return
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    final = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    written = writer.write_data(final, planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def read_state(state: State, reader: FileSystemReader, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of ``state``, in place; every rank calls.

    Raises:
        CheckpointError: on every rank of a group, if one could not.
    """
    state = by_pieces(state)
    if group is not None:
        with _naming_ranks():
            load(state, storage_reader=reader, process_group=group)
        return
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plans = reader.prepare_global_plan(planner.create_global_plan([local]))
    reader.read_data(planner.finish_plan(plans[0]), planner).wait()


@contextmanager
def _naming_ranks() -> Generator[None]:
    """Have what torch raises on all ranks, which is no ``Exception``, say what failed on which."""
    try:
        yield
    except CheckpointException as error:
        failures = error.failures.items()
        said = "; ".join(f"rank {rank}: {type(why).__name__}: {why}" for rank, (why, _) in failures)
        raise CheckpointError(said) from error
