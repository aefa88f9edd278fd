"""Texts of a run for a person to look at: rollout replicas append them, the report shows some."""

import json
from collections.abc import Iterable
from pathlib import Path

from cosmos_app.report import Sample

_MOST_SHOWN = 6


def append_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Add samples to a replica's file, one JSON line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for sample in samples:
            line = {
                "prompt": sample.prompt,
                "response": sample.response,
                "reward": sample.reward,
                "version": sample.version,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def last_samples(directory: Path, most: int = _MOST_SHOWN) -> list[Sample]:
    """Return the newest samples of all replicas, newest version first, prompts in order."""
    samples: list[Sample] = []
    for path in sorted(directory.glob("samples-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                samples.append(Sample(**json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                continue  # the torn last line of a replica that was killed
    newest = max((sample.version for sample in samples), default=0)
    shown = sorted((s for s in samples if s.version == newest), key=lambda s: s.prompt)
    return shown[:most]
