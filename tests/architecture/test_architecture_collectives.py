"""Weights move from rank to rank: no collective of a communicator is on the way of a transfer."""

import ast

_PACKAGE = "packages/cosmos-weightsync/src/cosmos_weightsync/"
_REASONS = {
    "encodings/amax.py": "scales of blocks that a shard cuts, among trainer ranks, when publishing",
    "integrations/vllm_engine.py": "whether all workers can commit, among workers, no weights",
    "integrations/vllm_trainer.py": "endpoints of the trainer's ranks, once",
}
_STEMS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "scatter",
)
_OTHERS = ("np.", "numpy.", "torch.", "self.")
"""Whose functions have the same names; `torch.distributed` is longer."""


def _full_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_collective(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    if f"{owner}." in _OTHERS or last in ("broadcast_to", "broadcast_shapes", "broadcast_tensors"):
        return False
    last = last.removeprefix("_")
    return any(last == stem or last.startswith(f"{stem}_") for stem in _STEMS) or last.startswith(
        ("allgather", "allreduce", "alltoall")
    )


def _collectives(tree: ast.AST) -> list[str]:
    """Calls of collectives, by any owner, and names of such that are imported."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_collective(name := _full_name(node.func)):
            found.append(f"line {node.lineno}: {name}")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            names = [alias.name for alias in node.names if _is_collective(alias.name)]
            found += [f"line {node.lineno}: import of {name}" for name in names]
    return found


def _found(sources) -> dict[str, list[str]]:
    return {
        source.path.removeprefix(_PACKAGE): calls
        for source in sources
        if source.path.startswith(_PACKAGE) and (calls := _collectives(source.tree))
    }


def test_no_collective_is_on_the_way_of_a_transfer(sources):
    found = {path: calls for path, calls in _found(sources).items() if path not in _REASONS}
    assert not found, "\n".join(f"{path}: {'; '.join(calls)}" for path, calls in found.items())


def test_no_reason_for_a_collective_has_outlived_it(sources):
    assert not _REASONS.keys() - _found(sources).keys(), "delete these from _REASONS"


def test_what_a_collective_is():
    code = "dist.all_reduce(x)\ngroup.allgather(x)\nnp.broadcast_to(x, 3)\ntorch.gather(x, 0, i)\n"
    code += "from torch.distributed import barrier\ntorch.distributed.barrier()"
    found = ["line 1: dist.all_reduce", "line 2: group.allgather"]
    found += ["line 5: import of barrier", "line 6: torch.distributed.barrier"]
    assert sorted(_collectives(ast.parse(code))) == found
