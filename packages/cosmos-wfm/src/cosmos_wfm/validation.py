"""Pictures and videos of fixed prompts from fixed noise, drawn while training: people look."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.drawing import SamplerConfig, draw
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.prompt_lengths import evenly_spaced
from cosmos_wfm.prompts import read_prompts
from cosmos_wfm.ranges import check_at_least, check_positive, check_unused
from cosmos_wfm.reward_client import RewardServiceConfig
from cosmos_wfm.rewards import check_rewards, local_sample_scorer
from cosmos_wfm.sample_rewards import SampleScorer
from cosmos_wfm.seeds import seeded_generator
from cosmos_wfm.videos import write_video


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """What is drawn, and how often.

    Attributes:
        prompts: what of; a row of the grid each.
        prompt_set: instead, a set of prompts as the run's own are, whose lines may say more than
            the prompt, which goes to rewards; ``num_prompts`` of them are drawn.
        num_prompts: of the set, evenly spaced; all if it has fewer.
        every: steps between; before the first and after the last step in any case.
        samples_per_prompt: columns of the grid.
        sampler: size, steps and guidance.
        seed: of the noise, which is the same each time.
        fps: frames of a second of the videos that are written: 16, or 24 of Wan 2.2's small form.
        gallery: of how many prompts, the first ones, each sample is a file of its own as well, with
            its rewards, for the dashboard; 0 writes grids and videos alone.
        keep: how many validations keep these files and their videos: the first, the newest and
            evenly between; grids stay. 0 keeps all.
        rewards: of the samples: name to weight in the sum; empty for those of the run, of which
            fine-tuning has none.
        reward_service: who computes these ``rewards``; this process if it is ``None``.
        deadline_s: longest that training waits for rewards of a validation, which have failed then.
    """

    prompts: tuple[str, ...] = ()
    prompt_set: str = ""
    num_prompts: int = 16
    every: int = 100
    samples_per_prompt: int = 4
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    seed: int = 0
    fps: int = 16
    gallery: int = 16
    keep: int = 100
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    reward_service: RewardServiceConfig | None = None
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        """Check that something is drawn.

        Raises:
            WfmConfigError: names what is missing.
        """
        if bool(self.prompts) == bool(self.prompt_set):
            raise WfmConfigError(
                "validation: prompts and prompt_set are both set; keep one of them"
                if self.prompts
                else "validation: there are no prompts; name prompts, or a prompt_set"
            )
        if not self.prompt_set:
            check_unused("validation", self, {"num_prompts": 16}, "prompt_set")
        check_at_least("validation", self, num_prompts=1)
        if self.reward_service is not None and not self.rewards:
            raise WfmConfigError("validation: reward_service is set, but rewards names none")
        check_rewards(self.rewards, self.reward_service)
        check_positive("validation", self, "deadline_s")
        check_at_least("validation", self, every=1, samples_per_prompt=1, seed=0, fps=1)
        check_at_least("validation", self, gallery=0, keep=0)
        if self.keep == 1:
            raise WfmConfigError(
                "validation: keep is 1, which leaves none to compare; want 2 or more, 0 for all"
            )

    def with_prompts(self) -> "ValidationConfig":
        """Return the same with the prompts of its set, read.

        Raises:
            WfmConfigError: if the set is not there, or a line of it is wrong.
        """
        if not self.prompt_set:
            return self
        found = evenly_spaced(read_prompts(Path(self.prompt_set), 1), self.num_prompts)
        return replace(self, prompts=tuple(found), prompt_set="", num_prompts=16)


def named_scorer(
    config: ValidationConfig | None, given: SampleScorer | None
) -> SampleScorer | None:
    """Return what rewards samples by the table of validation itself.

    Args:
        config: of the run.
        given: what was handed over, which goes before anything else.

    Returns:
        ``None`` if it names no rewards.

    Raises:
        WfmConfigError: if it names a service, and nothing was handed over that asks it.
    """
    if config is None or given is not None or not config.rewards:
        return given
    if config.reward_service is not None:
        raise WfmConfigError(
            "validation: reward_service is set; hand over sample_scorer() of its RewardClient"
        )
    return local_sample_scorer(config.rewards)


@torch.no_grad()
def draw_samples(
    adapter: DiffusionModelAdapter, config: ValidationConfig, *, at_once: int = 1
) -> Float[Tensor, "P K 3 *S"]:
    """Draw samples with the denoiser as it is; every rank of a sharded one calls.

    Args:
        adapter: the model.
        config: what to draw.
        at_once: samples of one pass: as many as training has memory for.

    Returns:
        Pixels in [-1, 1], not clipped: a row for each prompt.
    """
    config = config.with_prompts()
    config.sampler.check_model(adapter, "validation.sampler")
    rows: list[Tensor] = []
    for row, prompt in enumerate(config.prompts):
        columns = range(config.samples_per_prompt)
        parts = [columns[start : start + at_once] for start in columns[::at_once]]
        drawn = [_draw(adapter, config, prompt, [(row, column) for column in p]) for p in parts]
        rows.append(torch.cat(drawn))
    return torch.stack(rows)


def _draw(
    adapter: DiffusionModelAdapter,
    config: ValidationConfig,
    prompt: str,
    places: Sequence[tuple[int, int]],
) -> Float[Tensor, "K 3 *S"]:
    """Draw the samples of a prompt at some places of the grid, by row and column."""
    generators = [seeded_generator(config.seed, *place) for place in places]
    prompts = [prompt] * len(places)
    samples = draw(adapter, adapter.transformer, prompts, config.sampler, generators)
    return adapter.decode(samples.latents).cpu()


def write_samples(pixels: Float[Tensor, "P K 3 *S"], directory: Path, *, fps: int = 16) -> None:
    """Write ``grid.png``, and of videos one ``<row>_<column>.mp4`` each as well.

    The grid of videos has the first, middle and last frame of each, side by side.

    Args:
        pixels: in [-1, 1]; a row for each prompt.
        directory: made if it is not there.
        fps: of videos.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if pixels.dim() == 5:
        save_grid(pixels, directory / "grid.png")
        return
    for row, videos in enumerate(pixels):
        for column, video in enumerate(videos):
            write_video(directory / f"{row}_{column}.mp4", video, fps=fps)
    frames = pixels.shape[3]
    chosen = pixels[:, :, :, [0, frames // 2, frames - 1]]
    save_grid(chosen.permute(0, 1, 3, 2, 4, 5).flatten(1, 2), directory / "grid.png")


def save_grid(pixels: Float[Tensor, "P K 3 H W"], path: Path, *, enlarged: int = 1) -> None:
    """Write pictures in [-1, 1] as one PNG, a row for each prompt.

    Args:
        pixels: what to show.
        path: of the file.
        enlarged: pixels of the file for one of a picture, each way.
    """
    scaled = (pixels.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    grid = scaled.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # [P·H, K·W, 3]
    picture = Image.fromarray(grid.contiguous().numpy())
    size = (picture.width * enlarged, picture.height * enlarged)
    picture.resize(size, Image.Resampling.NEAREST).save(path)


def prompts_text(prompts: Sequence[str]) -> str:
    """Return what says which row of a grid is which prompt."""
    return "".join(f"{row}: {' '.join(prompt.split())}\n" for row, prompt in enumerate(prompts))
