"""What a controller is told about a run."""

from dataclasses import dataclass, field
from typing import Literal

from cosmos_core.control.endurance import EnduranceConfig

StalenessName = Literal["block", "count", "drop", "window"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessConfig:
    """How far sampling may run ahead of training; 0 and 0 is synchronous on-policy.

    Staleness of a group is the step that trains on it less the version of its oldest token.

    Attributes:
        depth: steps' worth of prompts issued ahead of the step being trained: the typical
            staleness.
        bound: largest staleness that is ever trained on, under ``block`` and ``drop``.
        policy: what holds the bound. ``block`` waits for stragglers; ``drop`` trains without them
            and drops what has become too old (which favours short answers); ``count`` issues by
            depth alone and ``window`` takes a step's groups from the oldest issued, without a
            bound.
        window: under ``window``, how many more than a step's worth of the oldest issued groups a
            step may choose from, as a share of a step.
    """

    depth: int = 2
    bound: int = 4
    policy: StalenessName = "block"
    window: float = 0.3

    def __post_init__(self) -> None:
        """Refuse a depth that the bound could not keep up with.

        Raises:
            ValueError: if ``depth`` is negative or exceeds ``bound``, or ``window`` is negative.
        """
        if not 0 <= self.depth <= self.bound:
            raise ValueError(
                f"depth is {self.depth} and bound {self.bound}; want 0 <= depth <= bound"
            )
        if not self.window >= 0:
            raise ValueError(f"window is {self.window}; it must be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPlan:
    """When held-out prompts are answered, by exactly one weight version.

    Attributes:
        num_prompts: prompts in a validation; 0 for no validation at all.
        num_samples: answers to each.
        before: validate the first version, before training prompts are issued.
        after: validate the last version.
        every: steps between validations in between, 0 for none. Who answers keeps its version for
            as long: half of the replicas at most. Training goes on by the samples of the others; if
            there is one replica alone, as far as the bound.
    """

    num_prompts: int = 0
    num_samples: int = 1
    before: bool = True
    after: bool = True
    every: int = 0

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ValueError: if one is negative, or nobody would answer.
        """
        if self.num_samples < 1:
            raise ValueError(f"num_samples is {self.num_samples}; it must be 1 or more")
        if self.num_prompts < 0 or self.every < 0:
            raise ValueError(
                f"num_prompts is {self.num_prompts} and every {self.every}; neither may be negative"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """The run as the controller sees it.

    Attributes:
        num_steps: optimizer steps in all.
        groups_per_step: prompts in a step.
        samples_per_group: samples of each.
        num_policies: policy replicas; a step is committed when all of them took it.
        min_policies: 0, or how few policy replicas may take a step while others come and go. They
            then agree among themselves who takes a step and that all of those took it, and give
            newcomers the newest weights; so one of them speaks for all.
        staleness: how far sampling may run ahead.
        validation: when held-out prompts are answered.
        checkpoint_every: steps between checkpoints; 0 for one at the end alone.
        drop_zero_signal: replace groups whose rewards are all equal by new prompts.
        min_group_samples: fewer completed samples than this and the group is tried again.
        max_attempts: after so many attempts a group is dropped.
        lease_s: a replica not heard of for so long is dead.
        first_lease_s: the same until it has done its first work, since it may have to compile.
        endurance: when a run ends that gets no further.
    """

    num_steps: int
    groups_per_step: int
    samples_per_group: int
    num_policies: int = 1
    min_policies: int = 0
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    validation: ValidationPlan = field(default_factory=ValidationPlan)
    checkpoint_every: int = 0
    drop_zero_signal: bool = False
    min_group_samples: int = 2
    max_attempts: int = 5
    lease_s: float = 30.0
    first_lease_s: float = 300.0
    endurance: EnduranceConfig = field(default_factory=EnduranceConfig)

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            ValueError: naming the count that is too small; if no group could ever be trained on.
        """
        counts = (
            "num_steps",
            "groups_per_step",
            "samples_per_group",
            "num_policies",
            "min_group_samples",
            "max_attempts",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.min_policies <= self.num_policies:
            raise ValueError(
                f"min_policies is {self.min_policies} and num_policies {self.num_policies}; "
                "want 0 <= min_policies <= num_policies"
            )
        if self.drop_zero_signal and self.samples_per_group == 1:
            raise ValueError(
                "drop_zero_signal with samples_per_group 1: the reward of one sample equals "
                "itself, so that every group would be dropped; want 2 samples or more"
            )
        if not 0 < self.lease_s <= self.first_lease_s:
            raise ValueError(
                f"lease_s is {self.lease_s} and first_lease_s {self.first_lease_s}; "
                "want 0 < lease_s <= first_lease_s"
            )

    @property
    def policies_needed(self) -> int:
        """How many policy replicas have to be there for a step."""
        return self.min_policies or self.num_policies
