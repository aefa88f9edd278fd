"""Ranks that train beside a reference or a teacher, or a reward model, in one layout.

See parallel_pool.

A result is, by the name of a loss: what each step and an evaluation say, and at last the fewest
micro-batches of a rank, below 0, and the most, for each step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parallel_pool import NUM_STEPS, run_pool
from torch.distributed.tensor import DTensor

from cosmos_algos import (
    DistillationConfig,
    DpoConfig,
    GrpoConfig,
    KlConfig,
    KtoConfig,
    LabelledTokens,
    ObjectiveConfig,
    OnPolicyDistillationConfig,
    RewardModelConfig,
    Share,
    empty_batch,
)
from cosmos_app.given.distillation import DistillationTask
from cosmos_app.given.divided import Divided
from cosmos_app.given.preference_data import MarkedSample
from cosmos_app.given.preferences import KtoTask, Layout, PairTask
from cosmos_app.given.reward_model import RewardTask
from cosmos_app.given.supervised import SftTask
from cosmos_app.token_scorers import scorers_of
from cosmos_core.trajectory import Trajectory, VersionSpan
from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    ProcessContext,
    Scorer,
    SftBatchConfig,
    SftExample,
    TrainingMesh,
    build_mesh,
    copy_weights,
    load_causal_lm,
)

VOCABULARY = 64
# tokens of the samples of each step; in the last one not every rank has a sample
LENGTHS = ((23, 4, 5, 6, 7, 8, 3, 9), (6, 20, 5, 11, 5, 4, 9, 8), (8,))
BATCH = SftBatchConfig(batch_size=5, max_tokens=24, bucket=1)
PENALISED = {
    place: GrpoConfig(
        objective=ObjectiveConfig(kl=KlConfig(coefficient=0.1, place=place, estimator="k3"))
    )
    for place in ("loss", "reward")
}
MOVED_AFTER = 1  # the step after which the reference is the policy


@dataclass(frozen=True)
class Work:
    """Micro-batches of steps, those of an evaluation, and how they are judged."""

    batches: Callable[[int], Sequence[Any]]
    held_out: Sequence[Any]
    loss: Callable[[torch.nn.Module, Any], Any]
    scorers: Sequence[Scorer[Any]]
    filler: Any
    prepare: Callable[[Learner, int], None] = lambda learner, step: None
    after: Callable[[torch.nn.Module, int], None] = lambda model, step: None


def trajectory(sibling: int, length: int, step: int) -> Trajectory:
    """Return a sample whose answer is its second half."""
    drawn = np.random.default_rng([step, sibling])
    prompt = length // 2
    trainable = np.arange(length) >= prompt
    return Trajectory(
        prompt_id="p",
        group=f"g{sibling // 2}",
        sibling=sibling,
        attempt=0,
        token_ids=drawn.integers(0, VOCABULARY, length, dtype=np.int32),
        logprobs=np.where(trainable, -4.0 - drawn.random(length), 0.0).astype(np.float32),
        trainable=trainable,
        versions=(VersionSpan(-1, prompt), VersionSpan(step, length - prompt)),
        rewards={},
        reward=float(drawn.random()),
        finish_reason="stop",
    )


def rl(config: Any, mesh: TrainingMesh, load: Callable[[str], Any], *, moves: bool = False) -> Work:
    """Return the work of an algorithm of reinforcement learning."""
    algorithm = config.build()
    reference = load("reference") if "reference_logprobs" in algorithm.needs else None
    teacher = load("teacher") if "teacher_logprobs" in algorithm.needs else None

    def batches(step: int) -> Sequence[Any]:
        samples = [trajectory(n, length, step) for n, length in enumerate(LENGTHS[step])]
        share = Share(max_tokens=24, rank=mesh.data_rank, num_ranks=mesh.data_size)
        mine = algorithm.batches(samples, share, policy_version=step)
        return [batch.to(mesh.process.device) for batch in mine]

    def after(model: torch.nn.Module, step: int) -> None:
        if moves and step == MOVED_AFTER:
            copy_weights(model, reference)

    return Work(
        batches,
        batches(0),
        algorithm.loss,
        scorers_of(algorithm, reference, teacher),
        empty_batch().to(mesh.process.device),
        after=after,
    )


def labelled(number: int, length: int) -> LabelledTokens:
    drawn = np.random.default_rng([9, number])
    tokens = drawn.integers(0, VOCABULARY, length, dtype=np.int32)
    return LabelledTokens(token_ids=tokens, trainable=np.arange(length) >= length // 2)


def given(task: Any, mesh: TrainingMesh) -> Work:
    """Return the work of a task on given data."""
    place = {"rank": mesh.data_rank, "size": mesh.data_size}
    return Work(
        lambda step: task.batches(step, **place),
        task.held_out(**place)[""],
        task.loss,
        task.scorers,
        task.filler,
        prepare=task.prepare,
    )


def pairs(mesh: TrainingMesh, load: Callable[[str], Any]) -> Work:
    data = [(labelled(2 * n, 4 + n), labelled(2 * n + 1, 11 - n)) for n in range(8)]
    layout = Layout(batch=BATCH, vocab_size=VOCABULARY)
    return given(
        PairTask(Divided.of(data[:6], data[6:]), load("reference"), DpoConfig(), layout), mesh
    )


def rewarded(mesh: TrainingMesh) -> Work:
    data = [(labelled(2 * n, 4 + n), labelled(2 * n + 1, 11 - n)) for n in range(8)]
    layout = Layout(batch=BATCH, vocab_size=VOCABULARY)
    return given(
        RewardTask(Divided.of(data[:6], data[6:]), RewardModelConfig(centering=0.1), layout), mesh
    )


def marked(mesh: TrainingMesh, load: Callable[[str], Any]) -> Work:
    samples = [labelled(n, 20 - 2 * n if n else 24) for n in range(8)]
    data = [
        MarkedSample(
            prompt=tuple(one.token_ids[~one.trainable].tolist()), tokens=one, desirable=n % 3 > 0
        )
        for n, one in enumerate(samples)
    ]
    layout = Layout(batch=BATCH, vocab_size=VOCABULARY)
    return given(
        KtoTask(Divided.of(data[:6], data[6:]), load("reference"), KtoConfig(), layout), mesh
    )


def taught(config: DistillationConfig, mesh: TrainingMesh, load: Callable[[str], Any]) -> Work:
    samples = [labelled(n, 20 - 2 * n if n else 24) for n in range(8)]
    data = [SftExample(token_ids=s.token_ids, trainable=s.trainable) for s in samples]
    examples = SftTask(Divided.of(data[:6], data[6:]), BATCH)
    return given(DistillationTask(examples, load("teacher"), config), mesh)


BOTH = OnPolicyDistillationConfig(
    objective=ObjectiveConfig(teacher_coefficient=1.0, kl=KlConfig(coefficient=0.1))
)
LOSSES: dict[str, Callable[[TrainingMesh, Callable[[str], Any]], Work]] = {
    "kl-in-loss": lambda mesh, load: rl(PENALISED["loss"], mesh, load),
    "kl-in-reward": lambda mesh, load: rl(PENALISED["reward"], mesh, load),
    "moving-reference": lambda mesh, load: rl(PENALISED["loss"], mesh, load, moves=True),
    "teacher": lambda mesh, load: rl(OnPolicyDistillationConfig(), mesh, load),
    "likeliest": lambda mesh, load: rl(OnPolicyDistillationConfig(top_k=5), mesh, load),
    "teacher-and-reference": lambda mesh, load: rl(BOTH, mesh, load),
    "dpo": pairs,
    "kto": marked,
    "reward-model": lambda mesh, load: rewarded(mesh),
    "distillation": lambda mesh, load: taught(DistillationConfig(beta=0.5), mesh, load),
    "distillation-top-k": lambda mesh, load: taught(DistillationConfig(top_k=5), mesh, load),
}


def train(name: str, directory: Path, mesh: TrainingMesh, held: ModelConfig) -> list[list[float]]:
    """Train three steps under one loss; every rank of the case calls."""

    def load(which: str) -> Any:
        return load_causal_lm(directory / which, mesh, held).requires_grad_(False)

    work = LOSSES[name](mesh, load)
    held = replace(held, value_head=name == "reward-model")
    model = load_causal_lm(directory / "model", mesh, held)
    config = LearnerConfig(optimizer=AdamWConfig(lr=1e-3, weight_decay=0.01), max_grad_norm=0.5)
    learner = Learner(model, config, mesh=mesh)
    said: list[list[float]] = []
    numbers: list[int] = []
    for step in range(NUM_STEPS):
        work.prepare(learner, step)
        batches = work.batches(step)
        numbers.append(len(batches))
        report = learner.step(batches, work.loss, filler=work.filler, scorers=work.scorers)
        said.append([report.loss, report.grad_norm, *sums(report)])
        work.after(model, step)
    found = learner.evaluate(work.held_out, work.loss, filler=work.filler, scorers=work.scorers)
    if mesh.is_distributed:  # nothing is kept gathered of models that only score
        frozen = [one for each in work.scorers for one in each.model.parameters()]
        assert all(isinstance(parameter, DTensor) for parameter in frozen)
    signed = [n for number in numbers for n in (-number, number)]
    extremes = mesh.max_(torch.tensor(signed, device=mesh.process.device))
    return [*said, [found.loss, *sums(found)], [float(n) for n in extremes]]


def sums(report: Any) -> list[float]:
    """Return a report's metrics, but for those that say how micro-batches were filled."""
    return [v for n, v in sorted(report.metrics.items()) if n != "num_places"]


def take(case: dict, directory: Path, process: ProcessContext) -> dict[str, list[list[float]]]:
    """Train under every loss of a case."""
    mesh = build_mesh(ParallelConfig(**case["degrees"]), process)
    held = ModelConfig(implementation=case.get("implementation", "auto"))
    return {name: train(name, directory, mesh, held) for name in case["losses"]}


if __name__ == "__main__":
    run_pool(take)
