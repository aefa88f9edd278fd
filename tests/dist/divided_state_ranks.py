"""Layers with a state on ranks that share rows, and on one that has them whole, in float64.

python divided_state_ranks.py DIRECTORY NUM_RANKS... < cases; it writes what one process and each
number of ranks found of every case.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_ranks import Layout, Place, run_ranks
from torch import Tensor

from cosmos_parallel import init_distributed
from cosmos_parallel.native.delta_rule import apart, causal_convolution, gated_delta_rule, together
from cosmos_parallel.native.divided_states import Stretch, convolve_stretch, delta_rule_of_stretch
from cosmos_parallel.sequences import Visibility

HEADS, KEYS, VALUES, REACH = 2, 4, 6, 4
# by name: the length of rows, and where samples begin in each
Cases = dict[str, tuple[int, list[list[int]]]]


def drawn(length: int, starts: list[list[int]]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return what a layer works on of every row, positions, and the gradient of its output."""
    generator = torch.Generator().manual_seed(length)
    rows = len(starts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    channels = [normal(rows, length, HEADS * width) for width in (KEYS, KEYS, VALUES)]
    weights = [normal(HEADS * width, 1, REACH) for width in (KEYS, KEYS, VALUES)]
    uniform = torch.rand(2, rows, length, HEADS, generator=generator, dtype=torch.float64)
    # from what leaves all to what leaves nothing
    gates = [-8 * uniform[0] ** 6, uniform[1]]
    positions = torch.empty(rows, length, dtype=torch.int64)
    for row, begins in enumerate(starts):
        for begin, end in zip(begins, [*begins[1:], length], strict=True):
            positions[row, begin:end] = torch.arange(end - begin)
    return [*channels, *gates, *weights], positions, normal(rows, length, HEADS, VALUES)


def layer(given: list[Tensor], convolve: Callable, rule: Callable) -> Tensor:
    """Return [B, T, N, V]: what is convolved asks, keys and fills a state."""
    convolved = [
        convolve(each.flatten(0, 1)[None], weight)
        for each, weight in zip(given[:3], given[5:], strict=True)
    ]
    heads = [each.unflatten(-1, (HEADS, -1)) for each in convolved]
    gates = [each.flatten(0, 1)[None] for each in given[3:5]]
    return rule(*heads, *gates)[0].unflatten(0, given[0].shape[:2])


def whole(given: list[Tensor], positions: Tensor) -> Tensor:
    offsets = [*(positions == 0).flatten().nonzero().flatten().tolist(), positions.numel()]

    def convolve(sequence: Tensor, weight: Tensor) -> Tensor:
        return together(causal_convolution(*apart(offsets, sequence), weight), offsets)

    def rule(*sequences: Tensor) -> Tensor:
        return together(gated_delta_rule(*apart(offsets, *sequences)), offsets)

    return layer(given, convolve, rule)


def divided(given: list[Tensor], positions: Tensor, group: dist.ProcessGroup) -> Tensor:
    sight = Visibility.of(positions, group)
    stretch = Stretch.of(positions.chunk(group.size(), dim=1)[group.rank()], sight)
    return layer(
        given,
        lambda sequence, weight: convolve_stretch(sequence, weight, stretch),
        lambda *sequences: delta_rule_of_stretch(stretch, *sequences),
    )


def numbers(length: int, starts: list[list[int]], group: dist.ProcessGroup | None) -> dict:
    """Return outputs, gradients, and the bytes that are kept for backward."""
    given, positions, gradient = drawn(length, starts)
    if group is not None:
        given[:5] = [each.chunk(group.size(), dim=1)[group.rank()].clone() for each in given[:5]]
        gradient = gradient.chunk(group.size(), dim=1)[group.rank()]
    given = [each.requires_grad_() for each in given]
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = whole(given, positions) if group is None else divided(given, positions, group)
    output.backward(gradient)
    return {
        "output": output.detach(),
        "gradients": [each.grad for each in given],
        "kept_bytes": sum(kept.values()),
    }


def compare(directory: Path, cases: Cases, place: Place) -> None:
    num_ranks = place.layout.num_ranks
    meeting = f"file://{place.meeting}/ranks"
    init_distributed(place.rank, num_ranks, init_method=meeting, timeout_s=100)
    found = {name: numbers(*case, dist.group.WORLD) for name, case in cases.items()}
    torch.save(found, directory / f"{num_ranks}-{place.rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, asked = Path(sys.argv[1]), json.load(sys.stdin)
    torch.save({name: numbers(*case, None) for name, case in asked.items()}, where / "1-0.pt")
    for number in map(int, sys.argv[2:]):
        run_ranks(Layout(num_ranks=number), lambda place: compare(where, asked, place))
