"""The recipe of a run of RL on a diffusion model, checked before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cosmos_core.serving_config import DashboardConfig
from cosmos_parallel import LearnerConfig, ParallelConfig
from cosmos_wfm.denoiser import ComputeConfig
from cosmos_wfm.drawing import SamplerConfig
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.nft import NftConfig
from cosmos_wfm.ranges import check_at_least, check_finite, check_positive
from cosmos_wfm.remote import DisaggregatedConfig
from cosmos_wfm.reward_client import RewardServiceConfig
from cosmos_wfm.rewards import check_rewards
from cosmos_wfm.rl_algorithms import RlAlgorithm, check_algorithm
from cosmos_wfm.scoring import CALLS_IN_ALL
from cosmos_wfm.training_checks import check_parallel, check_rates
from cosmos_wfm.training_data import DataConfig
from cosmos_wfm.training_run import LoggerConfig
from cosmos_wfm.tuning import LoraTuning, TuningConfig
from cosmos_wfm.uploads import UploadConfig
from cosmos_wfm.validation import ValidationConfig

_SLACK_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionRlConfig:
    """One RL run.

    Attributes:
        model: a local diffusers pipeline directory.
        prompts: a file of prompts, one per line or as JSON lines, or the directory of a set.
        prompt_order: ``shuffled`` by the seed, anew in each epoch, or as in the ``file``.
        output: directory under which ``safetensors/step_<N>`` is written.
        rewards: name of a reward to its weight in the sum; empty where a scorer is handed over.
        reward_service: who computes them; this process if it is ``None``.
        reward_deadline_s: for the rewards of a micro-batch that this process computes. Where they
            are late or fail, samples are rewarded one by one, in twice that all together, and those
            that still have none are left out of the step; a service has a deadline of its own.
        steps_without_rewards: steps in a row in which no sample has a reward, at which the run
            ends.
        num_steps: optimizer steps.
        groups_per_step: prompts of a step.
        samples_per_group: samples of each prompt; 2 or more.
        micro_batch_size: samples of one forward pass.
        save_every: steps between saves; 0 saves at the end only.
        checkpoint_every: steps between checkpoints to go on from; 0 writes one only on Ctrl-C.
        save_s: longest that the app lets a save, with its upload, or a checkpoint take.
        stall_s: longest that the app lets it take to load, and to get further after that, in a pass
            or in reading data, beside what has a time of its own.
        checkpoints: their directory or address (``s3://...``); empty for the output's own.
        upload: where saves go beside the output.
        loggers: which services the app sends figures and pictures to, beside the output.
        recompute: keep no activations of the denoiser's blocks, compute them again instead.
        validation: pictures that are drawn on the way.
        dashboard: the page of the run, which the app serves.
        seed: of noise, of the order of prompts and data, and of what adapters begin with.
        compute: in which type the denoiser computes, compiled or not.
        sampler: size, steps and guidance of rollouts.
        algorithm: how rewards become a loss.
        disaggregated: rollouts in processes of their own; ``None`` draws them in this one's.
        data: captioned images or videos that DDRL stays close to.
        tuning: adapters or all weights.
        parallel: how ranks share the work: FSDP2, HSDP with ``dp_replicate``, tokens
            of a sample by ``cp``.
        learner: optimizer, schedule, clipping and the average that is exported.
    """

    kind: Literal["wfm_rl"] = "wfm_rl"
    model: str
    prompts: str
    prompt_order: Literal["shuffled", "file"] = "shuffled"
    output: str
    rewards: Mapping[str, float]
    reward_service: RewardServiceConfig | None = None
    reward_deadline_s: float = 120.0
    steps_without_rewards: int = 3
    num_steps: int = 1000
    groups_per_step: int = 8
    samples_per_group: int = 8
    micro_batch_size: int = 4
    save_every: int = 0
    checkpoint_every: int = 0
    save_s: float = 1800.0
    stall_s: float = 3600.0
    checkpoints: str = ""
    upload: UploadConfig | None = None
    loggers: tuple[LoggerConfig, ...] = ()
    recompute: bool = False
    validation: ValidationConfig | None = None
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    seed: int = 0
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    algorithm: RlAlgorithm = field(default_factory=NftConfig)
    disaggregated: DisaggregatedConfig | None = None
    data: DataConfig | None = None
    tuning: TuningConfig = field(default_factory=LoraTuning)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)

    def __post_init__(self) -> None:
        """Check counts, rewards, and that guidance is used where it means something.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_parallel(self.parallel)
        check_at_least("rl", self, num_steps=1, groups_per_step=1, micro_batch_size=1, seed=0)
        check_at_least("rl", self, save_every=0, checkpoint_every=0, steps_without_rewards=1)
        check_positive("rl", self, "reward_deadline_s", "save_s", "stall_s")
        check_finite("rl", self, "reward_deadline_s", "save_s", "stall_s")
        check_rates(self.learner, self.num_steps)
        if self.samples_per_group < 2:
            raise WfmConfigError(
                f"rl: samples_per_group is {self.samples_per_group}; advantages need 2 or more"
            )
        check_rewards(self.rewards, self.reward_service)
        check_algorithm(self.algorithm, self.sampler, self.data, self.micro_batch_size)

    @property
    def scorer_deadline_s(self) -> float:
        """How long a scorer may take for a micro-batch before its samples are asked for alone."""
        if self.reward_service is None:
            return self.reward_deadline_s
        return self.reward_service.deadline_s + _SLACK_S  # the client gives up by itself, before

    @property
    def samples_deadline_s(self) -> float:
        """How long replicas may take for the samples of a step, with their rewards."""
        drawing = self.disaggregated or DisaggregatedConfig()
        return drawing.deadline_s + CALLS_IN_ALL * self.scorer_deadline_s
