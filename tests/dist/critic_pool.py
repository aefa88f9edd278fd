"""Ranks that train with a critic, in one layout; see parallel_pool.

A result is, by the name of a critic: what each step says, and at last the value head after them and
its average; by the name "numbers" the fewest micro-batches of a rank, below 0, and the most, for
each step. A case with ``save`` writes a checkpoint there before the last step, one with ``load``
begins with it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parallel_pool import NUM_STEPS, run_pool
from scoring_pool import LENGTHS, MOVED_AFTER, trajectory

from cosmos_algos import (
    Algorithm,
    CriticConfig,
    GaeConfig,
    KlConfig,
    ObjectiveConfig,
    PpoConfig,
    Share,
    TokenBatch,
    empty_batch,
)
from cosmos_app.roles.critic import critic_step
from cosmos_app.token_scorers import scorers_of
from cosmos_parallel import (
    AdamWConfig,
    CheckpointStore,
    EmaConfig,
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    ProcessContext,
    TrainingMesh,
    build_mesh,
    copy_weights,
    export_hf,
    load_causal_lm,
    whole_value_head,
)

GAE = GaeConfig(discount=0.9, decay=0.8)
PENALTY = KlConfig(coefficient=0.1, place="reward", estimator="k1")
MOVING = KlConfig(coefficient=0.1, place="loss", estimator="k3")
CRITICS = {
    # updates are large beside these clips
    "clipped": PpoConfig(critic=CriticConfig(gae=GAE, clip=0.01, coefficient=0.7), epochs=3),
    "plain": PpoConfig(critic=CriticConfig(gae=GAE, clip=0.0, whiten=False), epochs=2),
    "kl-in-reward": PpoConfig(
        critic=CriticConfig(gae=GAE), objective=ObjectiveConfig(kl=PENALTY), epochs=2
    ),
    "moving-reference": PpoConfig(
        critic=CriticConfig(gae=GAE, whiten=False), objective=ObjectiveConfig(kl=MOVING)
    ),
}
LEARNING = LearnerConfig(
    optimizer=AdamWConfig(lr=1e-2, weight_decay=0.01, eps=1e-3),
    max_grad_norm=0.5,
    ema=EmaConfig(decay=0.9),
)


def batches_of(algorithm: Algorithm, step: int, mesh: TrainingMesh) -> list[TokenBatch]:
    """Return this rank's micro-batches: of two ranks one has the last, and the other all before."""
    samples = [trajectory(n, length, step) for n, length in enumerate(LENGTHS[step])]
    batches = algorithm.batches(samples, Share(max_tokens=24), policy_version=step)
    if mesh.data_size > 1:
        batches = batches[-1:] if mesh.data_rank else batches[:-1]
    return [batch.to(mesh.process.device) for batch in list(batches) or [empty_batch()]]


class Critic:
    """A policy with a critic, and the reference beside it."""

    def __init__(self, name: str, directory: Path, mesh: TrainingMesh, held: ModelConfig) -> None:
        self.algorithm, self.mesh = CRITICS[name].build(), mesh
        self.model = load_causal_lm(directory / "model", mesh, held)
        self.learner = Learner(self.model, LEARNING, mesh=mesh)
        self.moves = CRITICS[name].objective.kl is MOVING
        self.reference = None
        if "reference_logprobs" in self.algorithm.needs:
            start = directory / ("model" if self.moves else "reference")
            beside = replace(held, value_head=False)
            self.reference = load_causal_lm(start, mesh, beside).requires_grad_(False)
        if self.moves:
            self.learner.companion = self.reference

    def step(self, step: int) -> list[float]:
        """Take one step; return what it says, metrics in the order of their names."""
        report = critic_step(
            self.learner,
            batches_of(self.algorithm, step, self.mesh),
            self.algorithm,
            value=self.algorithm.with_critic,
            loss=self.algorithm.loss,
            scorers=scorers_of(self.algorithm, self.reference, None),
        )
        if self.moves and step == MOVED_AFTER and self.reference is not None:
            copy_weights(self.model, self.reference)
        sums = [v for n, v in sorted(report.metrics.items()) if n != "num_places"]
        clipped = [report.metrics["clipped"], report.metrics["critic/clipped"]]
        return [*clipped, report.loss, report.grad_norm, *sums]

    def head(self) -> list[float]:
        """Return the value head and its average."""
        assert self.learner.ema is not None
        head = whole_value_head(self.model, self.mesh)
        with self.learner.ema.in_place():
            average = whole_value_head(self.model, self.mesh)
        return [*head[0].tolist(), *average[0].tolist()]


def train(name: str, case: dict, directory: Path, mesh: TrainingMesh) -> list[list[float]]:
    """Train three steps with one critic; every rank of the case calls."""
    held = ModelConfig(implementation=case.get("implementation", "auto"), value_head=True)
    critic = Critic(name, directory, mesh, held)
    said: list[list[float]] = []
    steps = range(NUM_STEPS)
    if "load" in case:
        found = CheckpointStore(directory / case["load"] / name, mesh).load(critic.learner)
        steps = range(found.step + 1, NUM_STEPS)
    for step in steps:
        if "save" in case and step == NUM_STEPS - 1:
            CheckpointStore(directory / case["save"] / name, mesh).save(
                step - 1, critic.learner, b""
            )
        said.append(critic.step(step))
    if "export" in case:
        export_hf(critic.model, directory / case["export"] / name, mesh)
    return [*said, critic.head()]


def take(case: dict, directory: Path, process: ProcessContext) -> dict[str, Any]:
    """Train with every critic of a case."""
    mesh = build_mesh(ParallelConfig(**case["degrees"]), process)
    algorithm = CRITICS["plain"].build()
    numbers = [len(batches_of(algorithm, step, mesh)) for step in range(NUM_STEPS)]
    signed = [n for number in numbers for n in (-number, number)]
    extremes = mesh.max_(torch.tensor(signed, device=process.device))
    trained = {name: train(name, case, directory, mesh) for name in case["critics"]}
    return {**trained, "numbers": extremes.tolist()}


if __name__ == "__main__":
    run_pool(take)
