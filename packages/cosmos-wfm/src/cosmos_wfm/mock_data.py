"""Captioned noise: what a recipe is tried with, and timed, where there is no data yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cosmos_wfm.caption_data import CaptionedImage, Problems, sample_index
from cosmos_wfm.prompt_lengths import evenly_spaced
from cosmos_wfm.ranges import check_at_least
from cosmos_wfm.seeds import seeded_generator


@dataclass(frozen=True, kw_only=True, slots=True)
class MockCaptionsConfig:
    """Random samples of a size.

    Attributes:
        num_samples: of an epoch.
        frames: of a sample; 1 for images.
        height: of a sample, in pixels.
        width: of a sample, in pixels.
        buckets: sizes [height, width] that samples have in turn; empty gives all the one above.
        seed: of the pixels.
    """

    kind: Literal["mock"] = "mock"
    num_samples: int = 64
    frames: int = 1
    height: int = 1024
    width: int = 1024
    buckets: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a set without samples.

        Raises:
            WfmConfigError: if there are none, or they have no frame.
        """
        check_at_least("data", self, num_samples=1, frames=1, seed=0)

    def build(self) -> "MockCaptions":
        """Make the set."""
        return MockCaptions(self)


class MockCaptions(Sequence[CaptionedImage]):
    """Noise that is a function of the sample's number and the seed.

    Attributes:
        problems: none, ever.
    """

    def __init__(self, config: MockCaptionsConfig) -> None:
        self._config = config
        self.problems = Problems("mock data", "fatal")

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._config.num_samples

    def __getitem__(self, index: int) -> CaptionedImage:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Draw one sample; its prompt has its number.

        Raises:
            IndexError: if there is none of that number.
        """
        config = self._config
        if not 0 <= index < config.num_samples:
            raise IndexError(index)
        sizes = config.buckets or ((config.height, config.width),)
        frames = (config.frames,) if config.frames > 1 else ()
        generator = seeded_generator(config.seed, index)
        pixels = torch.rand(3, *frames, *sizes[index % len(sizes)], generator=generator)
        return CaptionedImage(f"sample {index} of noise", pixels * 2 - 1)

    def captions(self, most: int) -> list[str]:
        """Return prompts of at most so many samples."""
        numbers = evenly_spaced(range(len(self)), most)
        return [f"sample {index} of noise" for index in numbers]

    def order(self, position: int, seed: int) -> int:
        """Return the sample at a position of the endless stream."""
        return sample_index(len(self), position, seed)

    def identity(self, index: int) -> str:
        """Return number and seed; the size is in the cache's key."""
        return f"mock {self._config.seed} {index}"
