"""Validation samples one by one, with an index that says what each is and how it was rewarded.

<output>/validation/step_<N>/index.json       written last, at once: what it names is there
<output>/validation/step_<N>/samples/0_1.png  prompt 0, sample 1; of a video its first frame
<output>/validation/step_<N>/0_1.mp4          the video
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cosmos_core.rundir import write_atomic
from cosmos_wfm.sample_rewards import SampleRewards
from cosmos_wfm.validation import ValidationConfig, save_grid

INDEX_FILE = "index.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GallerySample:
    """One sample of a validation.

    Attributes:
        row: of its prompt.
        column: which sample of the prompt.
        prompt: what was asked for.
        seed: of the validation; with row and column it fixes the noise.
        rewards: by name, without those that mean nothing for this prompt or failed.
        reward: what a run would train on; ``None`` unless every one of them is there.
        problems: why rewards failed.
        picture: PNG relative to the validation's directory, of a video its first frame.
        video: MP4 relative to the same; empty for a picture.
    """

    row: int
    column: int
    prompt: str
    seed: int
    rewards: Mapping[str, float]
    reward: float | None
    problems: Sequence[str]
    picture: str
    video: str


def write_gallery(
    pixels: Float[Tensor, "P K 3 *S"],
    directory: Path,
    config: ValidationConfig,
    *,
    step: int,
    rewards: Sequence[Sequence[SampleRewards]] = (),
) -> None:
    """Write the samples of the first ``config.gallery`` prompts, and then their index.

    Args:
        pixels: in [-1, 1]; a row for each prompt. Videos of them lie in ``directory`` already.
        directory: of the validation.
        config: what was drawn.
        step: after which.
        rewards: of each sample; empty where nobody rewards any.
    """
    index = directory / INDEX_FILE
    index.unlink(missing_ok=True)  # what it names is written anew
    if not config.gallery:
        return
    (directory / "samples").mkdir(exist_ok=True)
    samples: list[GallerySample] = []
    for row, drawn in enumerate(pixels[: config.gallery]):
        for column, sample in enumerate(drawn):
            name = f"{row}_{column}"
            first = sample[:, 0] if sample.dim() == 4 else sample
            save_grid(first[None, None], directory / "samples" / f"{name}.png")
            earned = rewards[row][column] if rewards else SampleRewards()
            samples.append(
                GallerySample(
                    row=row,
                    column=column,
                    prompt=str(config.prompts[row]),
                    seed=config.seed,
                    rewards=earned.rewards,
                    reward=earned.reward,
                    problems=earned.problems,
                    picture=f"samples/{name}.png",
                    video=f"{name}.mp4" if sample.dim() == 4 else "",
                )
            )
    told: dict[str, Any] = {"format": _FORMAT, "step": step}
    write_atomic(index, json.dumps({**told, "samples": [asdict(sample) for sample in samples]}))


def thin_galleries(validations: Path, keep: int) -> None:
    """Remove samples of all but ``keep`` validations: the first, the newest, and evenly between.

    Grids and prompts stay.

    Args:
        validations: directory of all of them.
        keep: how many keep their samples, 2 or more; 0 for all.
    """
    steps = gallery_steps(validations)
    while 0 < keep < len(steps):
        inner = range(1, len(steps) - 1)
        close = min(inner, key=lambda i: steps[i + 1] - steps[i - 1])
        _remove_samples(validations / f"step_{steps.pop(close)}")


def gallery_steps(validations: Path) -> list[int]:
    """Return the steps of validations that have an index, in order."""
    named = (path.parent.name for path in validations.glob(f"step_*/{INDEX_FILE}"))
    return sorted(int(n[5:]) for n in named if n[5:].isdecimal())


def _remove_samples(directory: Path) -> None:
    (directory / INDEX_FILE).unlink(missing_ok=True)
    for path in [*(directory / "samples").glob("*.png"), *directory.glob("*.mp4")]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody may have put something there
        (directory / "samples").rmdir()
