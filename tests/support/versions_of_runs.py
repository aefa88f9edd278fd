"""What the weights of each version of a run say of its samples, by transformers alone."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from over_versions import logits_over_versions
from real_runs import Run

from cosmos_core.trajectory import Trajectory


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
