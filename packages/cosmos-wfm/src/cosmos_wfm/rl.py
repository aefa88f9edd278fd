"""RL of a diffusion model, rollout and training in one process group over one denoiser.

prompts -> rollouts (old policy) -> rewards -> advantages -> one optimizer step -> old policy
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from cosmos_parallel import (
    Learner,
    ParallelConfig,
    StepReport,
    TrainingMesh,
    build_mesh,
)
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.context import share_context
from cosmos_wfm.data_pairs import DataPairs
from cosmos_wfm.ddrl import DdrlBatch, DdrlConfig
from cosmos_wfm.denoiser import shard_denoiser
from cosmos_wfm.encoding import SampleEncoder
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.flow_batches import NoisingConfig
from cosmos_wfm.flow_grpo import FlowGrpoConfig
from cosmos_wfm.loading import load_adapter
from cosmos_wfm.nft import NftConfig
from cosmos_wfm.policies import CopiedPolicies
from cosmos_wfm.prompt_lengths import say_what_is_cut
from cosmos_wfm.prompts import read_prompts
from cosmos_wfm.remote import ConnectRollouts, RemoteRollouts
from cosmos_wfm.reward_client import RewardClient
from cosmos_wfm.rewards import check_prompts, local_sample_scorer, local_scorer
from cosmos_wfm.rl_algorithms import (
    advantages_of,
    make_loss,
    make_policies,
    old_lags,
    steps_config,
)
from cosmos_wfm.rl_config import DiffusionRlConfig
from cosmos_wfm.rollouts import Rollout, RolloutTask, StepParts
from cosmos_wfm.sample_rewards import SampleScorer, scorer_of_samples
from cosmos_wfm.scoring import GuardedScorer, Scorer
from cosmos_wfm.speed import SpeedMeter
from cosmos_wfm.step_rewards import RewardWatch, StepRewards, rewards_of_all
from cosmos_wfm.training_data import LeftOut, open_data
from cosmos_wfm.training_run import (
    OnStep,
    RunControl,
    RunOutputs,
    TrainingRun,
    Validated,
    ValidationHooks,
    look_away,
)
from cosmos_wfm.tuning import recompute_blocks
from cosmos_wfm.validation import named_scorer

_ALONE = RunControl()


class DiffusionRl:
    """A run, step by step; every rank of the mesh makes one and calls alike.

    Attributes:
        config: of the run.
        adapter: the model that is trained.
        learner: its optimizer.
        policies: what it is compared with.
    """

    def __init__(
        self,
        config: DiffusionRlConfig,
        *,
        mesh: TrainingMesh | None = None,
        scorer: Scorer | None = None,
        remote: ConnectRollouts | None = None,
        held_out: SampleScorer | None = None,
    ) -> None:
        """Load model and prompts, and shard.

        Args:
            config: the run.
            mesh: the ranks that share it; ``None`` for this process alone.
            scorer: what computes rewards; ``None`` for those of this package, in this process.
            remote: connects to the processes that draw samples; ``None`` to draw them here.
            held_out: what rewards validation samples; ``None`` for the rewards that the recipe has
                for them, or else those of the run, where this process can compute them.

        Raises:
            PipelineError: if the model cannot be loaded.
            WfmConfigError: if there are too few prompts, no client of the service that the config
                names, or of the processes, or no rewards; or if the model takes no such size.
        """
        if config.reward_service is not None and scorer is None and remote is None:
            raise WfmConfigError("rl: reward_service is set; pass its RewardClient as scorer")
        if (config.disaggregated is None) != (remote is None):
            raise WfmConfigError("rl: disaggregated and what connects to replicas go together")
        own = _no_scorer if remote is not None else scorer
        score = own or local_scorer(config.rewards)
        self._scorer = GuardedScorer(score, config.scorer_deadline_s)
        self.config = config
        self._held_out = named_scorer(config.validation, held_out) or self._own_rewards(scorer)
        self._mesh = mesh or build_mesh(ParallelConfig())
        self._watch = RewardWatch(config.steps_without_rewards, self._mesh.process.rank)
        self._prompts = read_prompts(Path(config.prompts), config.groups_per_step)
        if scorer is None and config.reward_service is None:
            check_prompts(config.rewards, self._prompts)
        self.adapter = load_adapter(config.model)
        config.sampler.check_model(self.adapter)
        if self._mesh.process.rank == 0:
            say_what_is_cut(self.adapter, self._prompts, "prompts")
        config.tuning.prepare(self.adapter, seed=config.seed)
        self.adapter.pipeline.to(self._mesh.process.device)
        self.policies = make_policies(self.adapter, config.tuning, config.algorithm)
        if config.recompute:
            recompute_blocks(self.adapter)
        trained = (self.adapter.transformer, self.adapter.blocks)
        for module, blocks in [*self.policies.modules(), trained]:
            share_context(module, blocks, self._mesh)
            shard_denoiser(module, blocks, self._mesh, config.compute)
        self.learner = Learner(self.adapter.transformer, config.learner, mesh=self._mesh)
        if isinstance(self.policies, CopiedPolicies) and old_lags(config.algorithm):
            self.learner.companion = self.policies.old_copy
        self._loss = make_loss(self.adapter, config.algorithm, self.policies)
        self._speed = SpeedMeter(self.adapter, self._mesh, copies=self.policies.modules())
        self._parts = step_parts(config, self._mesh.data_size)
        self._remote = self._connected(remote)
        self._data = self._open_pairs()

    def step(self, step: int) -> tuple[StepReport, dict[str, float]]:
        """Take step ``step``, from 0; return the learner's report, and rewards and speed.

        Raises:
            NoRewardsError: on every rank, if no sample of as many steps in a row has a reward as
                the config allows.
        """
        config, speed = self.config, self._speed
        speed.begin()
        task = rollout_task(config, self.adapter, step, self._scorer)
        rollouts = self._roll_out(task, step)
        with speed.part("wait_s"):
            rewards = self._all_rewards(rollouts)
        self._watch.look(step + 1, rewards)
        advantages = advantages_of(config.algorithm, rewards)
        with speed.part("data_s"):
            batches = [b for rollout in rollouts for b in self._batches(task, rollout, advantages)]
        speed.begin_training()
        report = self.learner.step(batches, self._loss)
        if isinstance(config.algorithm, NftConfig):
            self.policies.update_old(config.algorithm.decay.at(step + 1))
        num_samples = len(rewards.values)
        return report, {
            **rewards.figures(),
            **speed.figures(report, num_samples),
            **speed.drawing_figures(
                [rollout.cost for rollout in rollouts],
                num_samples,
                elsewhere=self._remote is not None,
            ),
        }

    def save(self, step: int) -> Path:
        """Write what was trained after ``step`` steps, averaged if the learner keeps an average."""
        return self.run().save(step)

    def run(
        self,
        on_validation: Callable[[Validated], None] = look_away,
        control: RunControl = _ALONE,
    ) -> TrainingRun:
        """Return this run's saves, checkpoints and validations, of which is told.

        ``control`` may stop it.
        """
        config = self.config
        return TrainingRun(
            adapter=self.adapter,
            learner=self.learner,
            mesh=self._mesh,
            tuning=config.tuning,
            outputs=RunOutputs.of(config),
            resumed=self._resumed,
            validation=ValidationHooks(told=on_validation, scorer=self._held_out),
            control=control,
            copies=[module for module, _ in self.policies.modules()],
        )

    def _own_rewards(self, scorer: Scorer | None) -> SampleScorer | None:
        """Return what rewards validation samples as the run's own are; ``None`` if nobody here."""
        config = self.config
        if config.validation is None:
            return None
        if isinstance(scorer, RewardClient):
            return scorer.sample_scorer(config.validation.deadline_s)
        if scorer is not None:
            return scorer_of_samples(self._scorer)
        is_local = config.rewards and config.reward_service is None
        return local_sample_scorer(config.rewards) if is_local else None

    def _connected(self, remote: ConnectRollouts | None) -> RemoteRollouts | None:
        if remote is None:
            return None
        weights = self.policies.weights(old=isinstance(self.config.algorithm, NftConfig))
        return remote(weights, self._parts)

    def _open_pairs(self) -> DataPairs | None:
        """Return the data that DDRL stays close to; ``None`` for another algorithm."""
        config, algorithm = self.config, self.config.algorithm
        if config.data is None or not isinstance(algorithm, DdrlConfig):
            return None
        opened = open_data(config.data, self.adapter, self._mesh)
        return DataPairs(
            encoder=SampleEncoder(self.adapter, opened, batch_size=config.micro_batch_size),
            left_out=LeftOut(opened, Path(config.output), self._mesh.process.rank),
            noising=NoisingConfig(flow=algorithm.flow),
            seed=config.seed,
            num_samples=config.groups_per_step * config.samples_per_group,
        )

    def _resumed(self) -> None:
        """Put right what is in no checkpoint: a copy of the denoiser that was the newest policy."""
        if isinstance(self.policies, CopiedPolicies) and self.learner.companion is None:
            self.policies.update_old(0.0)

    def _roll_out(self, task: RolloutTask, step: int) -> list[Rollout]:
        if self._remote is not None:
            with self._speed.part("wait_s"):
                self._remote.publish(step)
                taken = self._remote.take(step)
            return [each.to(self._mesh.process.device) for each in taken]
        rollouts: list[Rollout] = []
        for numbers in self._parts.of_rank(self._mesh.data_rank):
            prompts = self._parts.prompts(self._prompts, step, numbers)
            with self._sampling_policy() as policy:
                rollouts.append(task.run(policy, numbers, prompts))
        return rollouts

    def _sampling_policy(self) -> AbstractContextManager[Any]:
        """Return the old policy for NFT, whose rollouts it makes, else the trained one."""
        if isinstance(self.config.algorithm, NftConfig):
            return self.policies.old()
        return nullcontext(self.adapter.transformer)

    def _all_rewards(self, rollouts: Sequence[Rollout]) -> StepRewards:
        size = self.config.samples_per_group
        num = self.config.groups_per_step * size
        return rewards_of_all(rollouts, self._mesh, num_samples=num, group_size=size)

    def _batches(
        self, task: RolloutTask, rollout: Rollout, advantages: Float[Tensor, " N"]
    ) -> Sequence[Any]:
        """Return the algorithm's micro-batches of a rollout."""
        algorithm = self.config.algorithm
        if isinstance(algorithm, DdrlConfig):
            assert self._data is not None
            steps = task.step_batches(rollout, advantages)
            data = self._data.batches(task.step, rollout, advantages)
            return [DdrlBatch(steps=s, data=d) for s, d in zip(steps, data, strict=True)]
        if isinstance(algorithm, FlowGrpoConfig):
            return task.step_batches(rollout, advantages)
        return task.forward_batches(rollout, advantages, algorithm.timestep_fraction)


def _no_scorer(pixels: Tensor, prompts: Sequence[str]) -> list[float]:
    raise AssertionError("whoever draws samples elsewhere scores them there")


def train_rl(
    config: DiffusionRlConfig,
    *,
    mesh: TrainingMesh | None = None,
    scorer: Scorer | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
    on_validation: Callable[[Validated], None] = look_away,
) -> Path:
    """Run to the end and save; every rank of the mesh calls.

    Args:
        config: the run.
        mesh: the ranks that share it; ``None`` for this process alone.
        scorer: what computes rewards; ``None`` for those of this package, in this process.
        resume: go on from the newest checkpoint in the output directory, if there is one.
        on_step: called with the number of each finished step, from 1, the learner's report and
            the figures of rewards and speed (``cosmos_wfm.speed``).
        on_validation: called on rank 0 after each validation.

    Returns:
        The directory of the last save, for diffusers to load.

    Raises:
        WfmConfigError: if the output directory has checkpoints and is not to be resumed, or has
            what another run saved.
    """
    run = DiffusionRl(config, mesh=mesh, scorer=scorer)
    return take_rl_steps(run, resume=resume, on_step=on_step, on_validation=on_validation)


def take_rl_steps(
    run: DiffusionRl,
    *,
    resume: bool = False,
    on_step: OnStep | None = None,
    on_validation: Callable[[Validated], None] = look_away,
    control: RunControl = _ALONE,
) -> Path:
    """Take the steps of a run that are left, and save; as ``train_rl``.

    Raises:
        TrainingStoppedError: if ``control`` stops it.
    """

    def take(step: int) -> None:
        report, figures = run.step(step)
        if on_step is not None:
            on_step(step + 1, report, figures)

    return run.run(on_validation, control).take_steps(take, resume=resume)


def step_parts(config: DiffusionRlConfig, num_ranks: int) -> StepParts:
    """Return how the samples of a step are divided among ranks that train."""
    return StepParts(
        num_samples=config.groups_per_step * config.samples_per_group,
        samples_per_group=config.samples_per_group,
        micro_batch_size=config.micro_batch_size,
        num_ranks=num_ranks,
        prompt_seed=config.seed if config.prompt_order == "shuffled" else None,
    )


def rollout_task(
    config: DiffusionRlConfig, adapter: DiffusionModelAdapter, step: int, scorer: GuardedScorer
) -> RolloutTask:
    """Return how the samples of a step are drawn."""
    steps, service = steps_config(config.algorithm), config.reward_service
    return RolloutTask(
        adapter=adapter,
        config=config.sampler,
        sde=steps.sde if steps else None,
        seed=config.seed,
        step=step,
        reward=scorer,
        sends_latents=service is not None and service.send == "latents",
    )
