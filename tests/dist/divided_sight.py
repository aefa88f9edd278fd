"""Shows pictures and videos to models that several ranks share, and to whole ones.

python divided_sight.py DIRECTORY; in it are videos (v), pictures (p), and a model of each family.
"""

import sys
from pathlib import Path

import torch
from parallel_ranks import Layout, Place, full, run_ranks
from seeing import FAMILIES, reader_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer
from video_numbers import rows_of

from cosmos_parallel import (
    ParallelConfig,
    PictureReader,
    TrainingMesh,
    build_mesh,
    init_distributed,
    load_causal_lm,
)

# by what is divided; no number of tokens or frames here is a multiple of three
LAYOUTS = {"cp": ParallelConfig(cp=3), "tp": ParallelConfig(tp=2)}


def given_rows(directory: Path, reader: PictureReader, kind: str) -> dict[str, dict[str, Tensor]]:
    """Return what a model is given of the same rows in either layout."""
    tokenizer = AutoTokenizer.from_pretrained(directory / kind)
    rows = rows_of(directory)
    tokens = [
        torch.tensor(reader.expand(tokenizer.encode(text), images), dtype=torch.int64)
        for text, images in rows
    ]
    padded = pad_sequence(tokens, batch_first=True)
    valid = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True).bool()
    inputs = reader.inputs(padded, [images for _, images in rows])
    seen = reader.as_seen(padded)
    packed = inputs | {
        "input_ids": seen[valid][None],
        "mm_token_type_ids": inputs["mm_token_type_ids"][valid][None],
        "position_ids": reader.positions(padded, inputs)[:, valid][:, None],
    }
    return {"padded": inputs | {"input_ids": seen}, "packed": packed}


def run(model: nn.Module, given: dict[str, Tensor], mesh: TrainingMesh) -> dict:
    """Return logits, and the gradients of their product with fixed numbers."""
    model.zero_grad()
    logits = model(**given, use_cache=False).logits
    # what comes last in padded rows is nobody's
    given_to = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    ((logits * given_to).sum() * mesh.gradient_scale).backward()
    gradients = {
        name: full(value.grad) for name, value in model.named_parameters() if value.grad is not None
    }
    return {"logits": logits.detach(), "gradients": gradients}


def numbers(directory: Path, mesh: TrainingMesh) -> dict[tuple[str, str], dict]:
    """Return what `run` finds of every family and layout."""
    found: dict[tuple[str, str], dict] = {}
    for kind in FAMILIES:
        model = load_causal_lm(directory / kind, mesh)
        given = given_rows(directory, reader_of(directory / kind), kind)
        for layout, inputs in given.items():
            found[kind, layout] = run(model, inputs, mesh)
    return found


def compare(directory: Path, how: str, place: Place) -> None:
    num_ranks = place.layout.num_ranks
    meeting = f"file://{place.meeting}/ranks"
    process = init_distributed(place.rank, num_ranks, init_method=meeting, timeout_s=100)
    found = numbers(directory, build_mesh(LAYOUTS[how], process))
    if place.rank == 0:
        torch.save(found, directory / f"{how}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    torch.save(numbers(where, build_mesh(ParallelConfig())), where / "whole.pt")
    for axis, degrees in LAYOUTS.items():
        layout = Layout(num_ranks=degrees.cp * degrees.tp)
        run_ranks(layout, lambda place, axis=axis: compare(where, axis, place))
