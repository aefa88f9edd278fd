"""Ranks that read their own parts of models and write their own files of exports.

python own_shard_ranks.py DIRECTORY; reads DIRECTORY/cases.json, and writes what each rank found.
"""

import json
import sys
import threading
from pathlib import Path

import torch
import transformers
from parallel_ranks import Layout, Place, full, run_ranks

from cosmos_parallel import (
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    build_mesh,
    export_hf,
    init_distributed,
    load_causal_lm,
)
from cosmos_parallel.generic_weights import auto_class


def mesh_of(place: Place, **degrees: int):
    process = init_distributed(
        place.rank,
        place.layout.num_ranks,
        init_method=f"file://{place.meeting}/ranks",
        timeout_s=100,
    )
    return build_mesh(ParallelConfig(**degrees), process)


def difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((full(mine).double() - theirs.detach().double()).abs().max())


def compare(directory: Path, family: str, mesh, rank: int) -> dict:
    """Return how far a model on several ranks is from that of one process of transformers."""
    path = directory / family
    model = load_causal_lm(path, mesh)
    config = transformers.AutoConfig.from_pretrained(path)
    alone = auto_class(config).from_pretrained(path, dtype=torch.float32).eval()
    inputs = torch.load(directory / f"{family}.pt")
    theirs = {**dict(alone.named_parameters()), **dict(alone.named_buffers())}
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: dict = {"names": sorted(mine.keys() ^ theirs.keys())}
    found["weights"] = max(difference(mine[name], value) for name, value in theirs.items())
    with torch.no_grad():
        expected = alone(**inputs).logits
        found["logits"] = difference(model(**inputs).logits, expected)
    export_hf(model, directory / f"{family}-exported", mesh, max_shard_gb=2e-5)
    export_hf(model, directory / f"{family}-half", mesh, dtype="bfloat16")
    if rank == 0:
        again, loading = auto_class(config).from_pretrained(
            directory / f"{family}-exported", output_loading_info=True
        )
        with torch.no_grad():
            found["exported"] = difference(again.eval()(**inputs).logits, expected)
        found["loading"] = [str(each) for problem in loading.values() for each in problem]
    return found


def families(directory: Path) -> None:
    def body(place: Place, degrees: dict) -> None:
        mesh = mesh_of(place, **degrees)
        name = f"{place.layout.num_ranks}-{place.rank}.json"
        results = {}
        for family in json.loads((directory / "cases.json").read_text())[name[0]]:
            results[family] = compare(directory, family, mesh, place.rank)
        if place.layout.num_ranks == 2:
            results["adapter"] = adapter(directory, mesh)
        (directory / name).write_text(json.dumps(results))

    run_ranks(Layout(num_ranks=2), lambda place: body(place, {}))
    run_ranks(Layout(num_ranks=4), lambda place: body(place, {"tp": 2}))


def adapter(directory: Path, mesh) -> dict:
    """Return how far adapters start from those of one process, and their base from the file."""
    config = ModelConfig(lora=LoraConfig(rank=4))
    split = load_causal_lm(directory / "qwen-3", mesh, config)
    torch.distributed.barrier()
    alone = torch.load(directory / "adapter.pt")
    return {"weights": max(difference(p, alone[name]) for name, p in split.named_parameters())}


class Watch:
    """The most private memory that this process has while it runs, in bytes."""

    def __init__(self) -> None:
        self.peak = self.now()
        self.start = self.peak
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise SystemExit("no RssAnon in /proc/self/status")

    def _look(self) -> None:
        while not self._end.wait(0.002):
            self.peak = max(self.peak, self.now())

    def growth(self) -> int:
        self._end.set()
        self._thread.join()
        return max(self.peak, self.now()) - self.start


def memory(directory: Path) -> None:
    def body(place: Place) -> None:
        mesh = mesh_of(place)
        load_causal_lm(directory / "qwen-3", mesh)  # what any load imports and starts
        watch = Watch()
        model = load_causal_lm(directory / "large", mesh)
        loading = watch.growth()
        watch = Watch()
        export_hf(model, directory / "large-exported", mesh, dtype="bfloat16", max_shard_gb=0.006)
        found = {"loading": loading, "exporting": watch.growth()}
        found["whole"] = sum(p.numel() * p.element_size() for p in model.parameters())
        (directory / f"memory-{place.rank}.json").write_text(json.dumps(found))

    run_ranks(Layout(num_ranks=4), body)


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    single = load_causal_lm(
        where / "qwen-3", build_mesh(ParallelConfig()), ModelConfig(lora=LoraConfig(rank=4))
    )
    torch.save({name: full(p) for name, p in single.named_parameters()}, where / "adapter.pt")
    families(where)
    memory(where)
