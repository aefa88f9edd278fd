"""Names for runs of a trainer, so that version 7 of one is never taken for version 7 of another."""

import secrets

import torch.distributed as dist

__all__ = ["new_run_id"]


def new_run_id(rank: int, num_ranks: int) -> str:
    """A name that no other run has, equal on all ranks of a sending side.

    A side of one rank makes it up. Several ranks agree on it in the store of `torch.distributed`,
    without waiting for each other: the first to come decides. Each process counts what it has
    asked for, so that a side made later in the same processes has another name.

    Args:
        rank: The rank on the sending side, which need not be that of `torch.distributed`.
        num_ranks: Of the sending side.

    Returns:
        The name; empty where ranks cannot agree, since `torch.distributed` is not up, or is up for
        fewer processes than the side has ranks.
    """
    if num_ranks == 1:
        return secrets.token_hex(8)
    is_up = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
    if not is_up or dist.get_world_size() < num_ranks:
        return ""
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    common = store.compare_set("cosmos_weightsync/run", "", secrets.token_hex(8)).decode()
    mine = f"cosmos_weightsync/sides/{num_ranks}/{rank}/{dist.get_rank()}"
    return f"{common}-{store.add(mine, 1)}"
