"""Runs a scenario on several gloo ranks: one process imports torch once and forks the ranks.

python parallel_ranks.py SCENARIO DIRECTORY; each scenario writes its results to the directory.
"""

import dataclasses
import json
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.distributed  # noqa: F401  (imported once, before the fork)
from transformers import LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    ReplicaMembership,
    StoreReplicaGroup,
    TrainingMesh,
    build_mesh,
    init_distributed,
    load_causal_lm,
    shutdown_distributed,
)
from cosmos_parallel.gradients import local_part

DEADLINE_S = 120


@dataclasses.dataclass(frozen=True)
class Layout:
    num_replicas: int = 1
    num_ranks: int = 1
    dp_replicate: int = 1

    def __str__(self) -> str:
        return f"{self.num_replicas}x{self.num_ranks}r{self.dp_replicate}"


@dataclasses.dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict


@dataclasses.dataclass(frozen=True)
class Tokens:
    token_ids: torch.Tensor
    trainable: torch.Tensor


def next_token_loss(model, batch: Tokens) -> Sums:
    logits = model(input_ids=batch.token_ids, use_cache=False).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch.token_ids[:, 1:], reduction="none"
    )
    mask = batch.trainable[:, 1:]
    return Sums((losses * mask).sum(), mask.sum(), {"rows": torch.tensor(len(batch.token_ids))})


def micro_batches(step: int) -> list[Tokens]:
    """Five batches of very different numbers of trained tokens, one of them with none."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for num_trained in (1, 30, 0, 7, 16):
        ids = torch.randint(0, 64, (2, 18), generator=generator)
        mask = torch.zeros(2 * 18, dtype=torch.bool)
        mask[torch.randperm(36, generator=generator)[:num_trained]] = True
        batches.append(Tokens(ids, mask.view(2, 18)))
    return batches


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@dataclasses.dataclass(frozen=True)
class Place:
    layout: Layout
    replica: int
    rank: int
    meeting: Path

    @property
    def data_rank(self) -> int:
        return self.replica * self.layout.num_ranks + self.rank

    @property
    def data_size(self) -> int:
        return self.layout.num_replicas * self.layout.num_ranks

    def mesh(self) -> TrainingMesh:
        process = init_distributed(
            self.rank,
            self.layout.num_ranks,
            init_method=f"file://{self.meeting}/ranks-{self.replica}",
            timeout_s=60,
        )
        return build_mesh(ParallelConfig(dp_replicate=self.layout.dp_replicate), process)

    def replica_group(self) -> StoreReplicaGroup | None:
        if self.layout.num_replicas == 1:
            return None
        names = tuple(f"policy-{i}" for i in range(self.layout.num_replicas))
        store = dist.FileStore(str(self.meeting / "replicas"), self.data_size)
        return StoreReplicaGroup(
            store,
            ReplicaMembership(names=names, index=self.replica, rank=self.rank),
            timeout_s=60,
        )


def run_ranks(layout: Layout, body: Callable[[Place], None]) -> None:
    """Run ``body`` on every rank of every replica, in forked processes."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as meeting:
        places = [
            Place(layout, replica, rank, Path(meeting))
            for replica in range(layout.num_replicas)
            for rank in range(layout.num_ranks)
        ]
        ranks = [context.Process(target=_guarded, args=(body, place)) for place in places]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
        for process in ranks:
            if process.is_alive():
                process.kill()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{layout}: exit codes {[p.exitcode for p in ranks]}")


def _guarded(body: Callable[[Place], None], place: Place) -> None:
    torch.set_num_threads(1)
    try:
        body(place)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        shutdown_distributed()


def layouts(directory: Path) -> None:
    """Train each model for four steps under each layout."""
    cases = json.loads((directory / "cases.json").read_text())
    for case in cases:
        layout = Layout(*case["layout"])

        def body(place: Place, case=case, layout=layout) -> None:
            mesh = place.mesh()
            config = ModelConfig(activation_checkpointing=case["checkpointing"])
            model = load_causal_lm(Path(case["model"]), mesh, config)
            optimizer = AdamWConfig(lr=1e-3, weight_decay=0.01)
            learner = Learner(
                model,
                LearnerConfig(optimizer=optimizer, max_grad_norm=0.5),
                mesh=mesh,
                replica_group=place.replica_group(),
            )
            filler = micro_batches(99)[2]
            reports = []
            for step in range(4):
                mine = micro_batches(step)[place.data_rank :: place.data_size]
                reports.append(
                    dataclasses.asdict(learner.step(mine, next_token_loss, filler=filler))
                )
            weights = {name: full(value) for name, value in model.named_parameters()}
            parts = sum(local_part(p).numel() for p in model.parameters())
            if place.rank == 0:
                result = {"reports": reports, "weights": weights, "num_local": parts}
                torch.save(result, directory / f"{case['name']}-{place.replica}.pt")

        run_ranks(layout, body)


if __name__ == "__main__":
    {"layouts": layouts}[sys.argv[1]](Path(sys.argv[2]))
