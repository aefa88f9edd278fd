"""Runs a scenario on several gloo ranks: one process imports torch once and forks the ranks.

python parallel_ranks.py DIRECTORY SCENARIO...; each scenario writes its results there.
"""

import dataclasses
import json
import multiprocessing
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from first_use import import_for_ranks
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cosmos_parallel import (
    AdamWConfig,
    CheckpointError,
    CheckpointStore,
    Learner,
    LearnerConfig,
    ModelConfig,
    MuonConfig,
    NoBatchError,
    OptimizerError,
    ParallelConfig,
    ReplicaMembership,
    ScheduleConfig,
    StoreReplicaGroup,
    TrainingMesh,
    build_mesh,
    export_hf,
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
    import_for_ranks()
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
            model = load_causal_lm(directory / case["model"], mesh, config)
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


def make_learner(place: Place, directory: Path, seed_weights: float = 0.0):
    """Return a mesh and a learner of the Qwen3 model, its weights shifted to be different."""
    mesh = place.mesh() if place.layout.num_ranks > 1 else build_mesh(ParallelConfig())
    model = load_causal_lm(directory / "qwen3", mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).add_(seed_weights)
    optimizer = AdamWConfig(lr=1e-3, schedule=ScheduleConfig(num_warmup_steps=10))
    return mesh, Learner(model, LearnerConfig(optimizer=optimizer), mesh=mesh)


def take_step(learner: Learner, place: Place, step: int) -> dict:
    mine = micro_batches(step)[place.data_rank :: place.data_size]
    report = learner.step(mine, next_token_loss, filler=micro_batches(99)[2])
    return dataclasses.asdict(report)


def resharding(directory: Path) -> None:
    """Save on two ranks, in the background and under training; resume on other layouts."""

    def train(place: Place) -> None:
        mesh, learner = make_learner(place, directory)
        for step in range(3):
            take_step(learner, place, step)
        store = CheckpointStore(directory / "checkpoints", mesh)
        store.start_save(3, learner, b"cut")
        reports = [take_step(learner, place, step) for step in (3, 4)]
        store.close()
        export_hf(learner.model, directory / "exported", mesh, dtype="float32")
        weights = {name: full(value) for name, value in learner.model.named_parameters()}
        if place.rank == 0:
            torch.save({"reports": reports, "weights": weights}, directory / "trained.pt")

    def resume(place: Place) -> None:
        mesh, learner = make_learner(place, directory, seed_weights=0.1)
        store = CheckpointStore(directory / "checkpoints", mesh)
        checkpoint = store.load(learner)
        assert (checkpoint.step, checkpoint.extra, learner.num_updates) == (3, b"cut", 3)
        reports = [take_step(learner, place, step) for step in (3, 4)]
        store.close()
        if place.rank == 0:
            torch.save(reports, directory / f"resumed-{place.layout}.pt")

    def refuse(place: Place) -> None:
        mesh, learner = make_learner(place, directory)
        errors = []
        try:
            CheckpointStore(directory / "damaged", mesh).load(learner)
        except CheckpointError as error:
            errors.append(str(error))
        (directory / f"refused-{place.rank}.json").write_text(json.dumps(errors))

    run_ranks(Layout(num_ranks=2), train)
    for layout in (Layout(), Layout(num_ranks=2), Layout(num_ranks=3), Layout(1, 4, 2)):
        run_ranks(layout, resume)
    shutil.copytree(directory / "checkpoints", directory / "damaged")
    file = directory / "damaged" / "step-00000003" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-8])
    run_ranks(Layout(num_ranks=2), refuse)


def edges(directory: Path) -> None:
    """Ranks with nothing to do, or with nothing to train on."""

    def body(place: Place) -> None:
        _, learner = make_learner(place, directory)
        nothing, something = micro_batches(0)[2], micro_batches(0)[1]
        mine = [something] if place.rank == 0 else []
        facts = {"no_filler": []}
        try:
            learner.step(mine, next_token_loss)
        except NoBatchError as error:
            facts["no_filler"].append(str(error))
        facts["no_batch_anywhere"] = learner.step([], next_token_loss).outcome
        facts["no_weight_anywhere"] = learner.step([nothing], next_token_loss).outcome
        evaluated = learner.evaluate(mine, next_token_loss, filler=nothing)
        facts["evaluated"] = dataclasses.asdict(evaluated)
        gate = torch.nn.Parameter(
            distribute_tensor(torch.ones(1, 8), learner.mesh.fsdp_mesh, [Shard(0)])
        )
        try:
            MuonConfig().build({"mlp.shared_expert_gate.weight": gate})
        except OptimizerError as error:
            facts["one_row_for_muon"] = str(error)
        facts["one_has_weight"] = dataclasses.asdict(
            learner.step([something] if place.rank == 0 else [nothing], next_token_loss)
        )
        (directory / f"edges-{place.rank}.json").write_text(json.dumps(facts))

    def mixed(place: Place) -> None:
        mesh = place.mesh()
        config = ModelConfig(compute_dtype="bfloat16")
        learner = Learner(
            load_causal_lm(directory / "qwen3", mesh, config), LearnerConfig(), mesh=mesh
        )
        facts = take_step(learner, place, 0)
        kinds = {str(p.dtype) for p in learner.model.parameters()}
        (directory / "mixed.json").write_text(json.dumps([facts["loss"], sorted(kinds)]))

    run_ranks(Layout(num_ranks=2), body)
    run_ranks(Layout(), mixed)


def build_model(kind: str, path: Path, *, tied: bool) -> None:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "attention_dropout": 0.1,
    }
    config, model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    model(config(**sizes)).save_pretrained(path / kind)


if __name__ == "__main__":
    build_model("qwen3", Path(sys.argv[1]), tied=True)
    build_model("llama", Path(sys.argv[1]), tied=False)
    scenarios = {"layouts": layouts, "resharding": resharding, "edges": edges}
    for name in sys.argv[2:]:
        scenarios[name](Path(sys.argv[1]))
