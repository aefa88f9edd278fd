"""What the weights of each version of a run say of its samples, by transformers alone."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from over_versions import logits_over_versions
from real_runs import Run

from cosmos_app.samples import read_trajectories
from cosmos_core.trajectory import Trajectory
from cosmos_rollout import KvPolicy

RECORDED = ("rollout.record=true", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=100")
"""Settings of a run whose samples can be judged by the weights of each version."""
MOST_JUDGED = 12
"""Samples of a run that are compared with forward passes, the longest of them."""


def model_of_version(run: Run, version: int, folder: Path) -> torch.nn.Module:
    """Return the transformers model of one weight version; version 0 is the model it began with.

    Args:
        run: it saves every version.
        version: which.
        folder: where it is exported to.
    """
    from transformers import AutoModelForCausalLM

    from cosmos_app.export import export_checkpoint

    given = json.loads((run.output / "config.json").read_text())["model"]["path"]
    source = Path(given or run.output / "model")
    if version:
        source = folder / f"version-{version}"
        export_checkpoint(run.output, source, step=version)
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(
    models: Mapping[int, torch.nn.Module], trajectory: Trajectory
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs under each trained token's own version, and under the first alone."""
    tokens = torch.tensor(trajectory.token_ids, dtype=torch.long)
    per_version = {
        version: torch.log_softmax(models[version](tokens[None]).logits[0], dim=-1)
        for version in versions_of(trajectory)
    }
    versions = trajectory.version_of_each_step()
    places = [i for i in range(len(tokens)) if trajectory.trainable[i]]
    first = int(versions[places[0]])
    own = torch.stack([per_version[int(versions[i])][i - 1, tokens[i]] for i in places])
    stale = torch.stack([per_version[first][i - 1, tokens[i]] for i in places])
    return own, stale


def kept_logprobs(models: Mapping[int, torch.nn.Module], trajectory: Trajectory) -> torch.Tensor:
    """Return log-probs of a single turn whose versions go on with keys and values of before."""
    ids = trajectory.token_ids.tolist()
    spans = [span for span in trajectory.versions if span.version >= 0]
    table = torch.log_softmax(logits_over_versions(models.__getitem__, "keep", ids, spans), dim=-1)
    return table.gather(1, torch.tensor(ids[-len(table) :])[:, None])[:, 0]


def versions_of(trajectory: Trajectory) -> set[int]:
    """Return the versions that sampled a trajectory's tokens."""
    return {span.version for span in trajectory.versions if span.version >= 0}


def switched(run: Run) -> Iterator[Trajectory]:
    """Yield the recorded training samples whose tokens are of more than one version."""
    for path in sorted((run.output / "trajectories").glob("*.bin")):
        for trajectory in read_trajectories(path):
            if len(versions_of(trajectory)) > 1 and trajectory.group.startswith("train."):
                yield trajectory


@dataclass
class Distances:
    """How far recorded log-probs are from what transformers gives, by the version of the token.

    Each list has a number for each token. That of ``stale`` and ``anew`` are of tokens after a
    switch alone.

    Attributes:
        own: from the weights of the token's version, and the keys and values it should have met.
        stale: from the weights that the response began with.
        anew: from the weights of the token's version, all keys and values by these.
    """

    own: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    stale: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    anew: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self, trajectory: Trajectory, models: Mapping[int, torch.nn.Module], kv: KvPolicy
    ) -> None:
        """Add the tokens of a sample of one turn."""
        anew, stale = reference_logprobs(models, trajectory)
        own = kept_logprobs(models, trajectory) if kv == "keep" else anew
        recorded = torch.tensor(trajectory.logprobs[trajectory.trainable])
        versions = trajectory.version_of_each_step()[trajectory.trainable].tolist()
        for i, version in enumerate(versions):
            self.own[version].append(float((recorded - own).abs()[i]))
            if version != versions[0]:
                self.stale[version].append(float((recorded - stale).abs()[i]))
                self.anew[version].append(float((recorded - anew).abs()[i]))


def distances_over_switches(run: Run, kv: KvPolicy, folder: Path) -> Distances:
    """Judge the longest samples over a switch of a run that records them and saves every version.

    Args:
        run: is over.
        kv: what becomes of keys and values in its engines.
        folder: for models.
    """
    chosen = sorted(switched(run), key=lambda t: -t.num_tokens)[:MOST_JUDGED]
    assert chosen, "no response went over a version switch"
    needed = set[int]().union(*map(versions_of, chosen))
    models = {version: model_of_version(run, version, folder) for version in needed}
    distances = Distances()
    for trajectory in chosen:
        distances.add(trajectory, models, kv)
    assert len(distances.own) > 1
    return distances


def furthest(distances: Mapping[int, list[float]]) -> float:
    """Return the largest distance of any token."""
    return max(max(of_tokens) for of_tokens in distances.values())
