"""The loop of optimizer steps of a run with rollouts, as its recipe has it."""

from dataclasses import dataclass
from typing import Literal

from cosmos_app.ranges import require_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """The loop of optimizer steps.

    Attributes:
        steps: optimizer steps in all.
        groups_per_step: prompts in a step.
        samples_per_group: samples of each prompt.
        tokens_per_batch: most tokens in a micro-batch, padding included.
        layout: ``packed`` puts the samples of a micro-batch into one row without padding,
            ``padded`` gives each a row; ``auto`` packs where the model's attention keeps samples
            apart by itself.
        checkpoint_every: steps between checkpoints; the last step always has one; 0 for only that.
        keep_checkpoints: how many are kept.
        checkpoints: where they lie: a directory or a URL such as ``s3://bucket/run``; in the run
            directory when empty. A new run goes on from what is there.
        min_group_samples: fewest samples of a prompt that are trained on, or all where there are
            fewer: with less that have their rewards, it is sampled again, up to five times in all.
            A sample that fails beyond that costs itself and none of its siblings.
        drop_zero_signal: replace groups whose rewards are all equal (DAPO dynamic sampling).
        mask_truncated: leave samples that a limit of tokens cut off out of the loss (DAPO overlong
            filtering); they count among their group's rewards.
        keep_bad_steps: write the batches of steps whose loss or gradient was not finite to
            ``bad_steps/`` of the run directory.
        deterministic: have policies use deterministic kernels, and refuse what has none.
    """

    steps: int = 200
    groups_per_step: int = 64
    samples_per_group: int = 8
    tokens_per_batch: int = 16384
    layout: Literal["auto", "packed", "padded"] = "auto"
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    checkpoints: str = ""
    min_group_samples: int = 2
    drop_zero_signal: bool = False
    mask_truncated: bool = False
    keep_bad_steps: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        counts = ("steps", "groups_per_step", "samples_per_group", "tokens_per_batch")
        require_at_least(self, {**dict.fromkeys(counts, 1), "checkpoint_every": 0})
        require_at_least(self, {"keep_checkpoints": 1, "min_group_samples": 1})
        if self.drop_zero_signal and self.samples_per_group == 1:
            raise ValueError(
                "drop_zero_signal would drop every prompt of samples_per_group = 1, whose one "
                "reward equals itself; want 2 samples or more, or drop_zero_signal = false"
            )
