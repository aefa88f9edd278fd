"""Shows pictures to models that count their tokens as text, whole and shared by several ranks.

python divided_pictures.py DIRECTORY NUM_RANKS... < families; it writes what each number of ranks
found of every family.
"""

import json
import sys
from pathlib import Path

import torch
from parallel_ranks import Layout, Place, full, run_ranks
from seeing_in_order import MARK, config_of, pictures_of, rows_of
from tiny_models import write_random
from torch import Tensor

from cosmos_parallel import (
    ModelConfig,
    ParallelConfig,
    TrainingMesh,
    build_mesh,
    init_distributed,
    load_causal_lm,
)

GENERIC = ModelConfig(implementation="transformers")


def run(directory: Path, family: str, mesh: TrainingMesh) -> dict:
    """Return logits, the gradients of their product with fixed numbers, and what is looked at."""
    model = load_causal_lm(directory / family, mesh, GENERIC)
    rows = rows_of(torch.load(directory / f"{family}.tokens"))
    pictures = pictures_of(family)
    if family == "gemma3":
        pictures["token_type_ids"] = (rows == MARK).long()
    looked_at: list[int] = []

    def note(vision: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        looked_at.append(len(args[0] if args else kwargs["pixel_values"]))

    model.get_encoder(modality="image").register_forward_pre_hook(note, with_kwargs=True)
    logits = model(input_ids=rows, **pictures, use_cache=False).logits
    given_to = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    ((logits * given_to).sum() * mesh.gradient_scale).backward()
    gradients = {
        name: full(value.grad) for name, value in model.named_parameters() if value.grad is not None
    }
    return {"logits": logits.detach(), "gradients": gradients, "looked_at": looked_at}


def tokens_of_a_picture(directory: Path, family: str) -> int:
    """Return in how many tokens' places a model puts a picture."""
    model = load_causal_lm(directory / family, build_mesh(ParallelConfig()), GENERIC)
    pictures = pictures_of(family)
    with torch.no_grad():
        seen = model.base_model.get_image_features(**pictures, return_dict=True).pooler_output
    parts = seen if isinstance(seen, list | tuple) else [seen]
    return sum(part.flatten(0, -2).shape[0] for part in parts) // 3


def compare(directory: Path, families: list[str], place: Place) -> None:
    num_ranks = place.layout.num_ranks
    meeting = f"file://{place.meeting}/ranks"
    process = init_distributed(place.rank, num_ranks, init_method=meeting, timeout_s=100)
    mesh = build_mesh(ParallelConfig(cp=num_ranks), process)
    found = {family: run(directory, family, mesh) for family in families}
    torch.save(found, directory / f"{num_ranks}-{place.rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, asked = Path(sys.argv[1]), json.load(sys.stdin)
    for each in asked:
        write_random(config_of(each), where / each)
        torch.save(tokens_of_a_picture(where, each), where / f"{each}.tokens")
    alone = build_mesh(ParallelConfig())
    torch.save({each: run(where, each, alone) for each in asked}, where / "1-0.pt")
    for number in map(int, sys.argv[2:]):
        run_ranks(Layout(num_ranks=number), lambda place: compare(where, asked, place))
