"""The recipe: everything a run is, as one frozen value read from one TOML file.

Sections are the configs of the packages' own components; this module only names them and checks
the rules that hold between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cosmos_algos import AlgorithmConfig, GrpoConfig
from cosmos_app.bus_config import BusConfig
from cosmos_app.cluster_config import ClusterConfig
from cosmos_app.data_config import DataConfig, check_judged
from cosmos_app.endurance_limits import check_standstill
from cosmos_app.learnable import check_head, check_learnable
from cosmos_app.length_reward import LengthRewardConfig
from cosmos_app.policy_config import PolicyConfig, check_elastic
from cosmos_app.quickstart.tiny_model import TinyModelConfig
from cosmos_app.ranges import check_seed, require_at_least
from cosmos_app.rollout_config import RolloutConfig, check_colocation, check_nucleus
from cosmos_app.teacher_config import TeacherConfig, check_teacher
from cosmos_app.trainer_config import TrainerConfig
from cosmos_app.validation_config import ValidationConfig
from cosmos_core.config import load_config
from cosmos_core.control import ControllerConfig, EnduranceConfig, StalenessConfig
from cosmos_core.metrics import ConsoleSinkConfig, JsonlSinkConfig, SinkConfig
from cosmos_core.serving_config import DashboardConfig
from cosmos_parallel import ElasticConfig, LearnerConfig
from cosmos_parallel import ModelConfig as HeldModelConfig
from cosmos_rollout import RewardPoolConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model that is trained.

    Attributes:
        path: a local Hugging Face model directory; a tiny model is built when there is none.
        tiny: sizes of the model that is built.
        teacher: a local Hugging Face model directory, for algorithms that learn from a teacher; it
            has the tokens of the model that is trained.
        training: how weights are held and computed with while training.
    """

    path: Path | None = None
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    teacher: Path | None = None
    training: HeldModelConfig = field(default_factory=HeldModelConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConfig:
    """Supervised fine-tuning of a freshly built model, before RL; never of a model you bring.

    Attributes:
        steps: most optimizer steps; 0 for none.
        batch_size: rows in a step.
        stop_at_loss: stop as soon as the smoothed loss per token is below this; 0 for never.
        learner: how.
    """

    steps: int = 200
    batch_size: int = 256
    stop_at_loss: float = 0.0
    learner: LearnerConfig = field(default_factory=LearnerConfig)

    def __post_init__(self) -> None:
        require_at_least(self, {"steps": 0, "batch_size": 1})


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights go from policy to rollout replicas.

    Attributes:
        transport: ``auto`` takes the best that both sides can use: shared memory on one host.
        wire_dtype: weights are cast to this once before they are sent; empty for as they are.
        quantised: bits in which engines hold matrices, made once by the sender: "fp8" (e4m3, a
            scale for each row), "mxfp8" (one for every 32 values) or "nvfp4" (e2m1, one for every
            16 and one for each layer; activations in 4 bits too); the rest is sent in
            ``wire_dtype``, bfloat16 if that is empty. Only vLLM serves them. "mxfp4" is refused.
        bucket_mib: size of a transfer bucket.
        deadline_s: longest that a version may be on its way.
        snapshots: copies of its weights that a policy rank may keep, at least 2. Rollouts can fetch
            one version fewer at the same time while each new one is still published; one that has
            no room is skipped, for the next.
        from_rollouts: rollout replicas pass weights on. One that joins fetches its first from
            another that has them, of its own machine if there is one. Versions that all want enter
            each machine once, and go from machine to machine in as many chains as the policy has
            ranks for. Rollouts keep the version they serve in host memory. Not for adapters, nor
            where policy and rollouts take turns on a device: there the policy serves everybody, and
            everywhere those who failed to load.
        staged: engines generate while they fetch a version, and stand still for the swap alone.
            ``false`` has them stand still for both, as most systems do, to see what staging is
            worth; vLLM only, and not for adapters.
    """

    transport: Literal["auto", "shared_memory", "process_group", "tcp"] = "auto"
    wire_dtype: Literal["", "float32", "bfloat16"] = ""
    quantised: Literal["", "fp8", "mxfp8", "nvfp4", "mxfp4"] = ""
    bucket_mib: float = 16.0
    deadline_s: float = 120.0
    snapshots: int = 3
    from_rollouts: bool = True
    staged: bool = True

    def __post_init__(self) -> None:
        """Check the ranges, and refuse what could not be shown to be served right.

        Raises:
            ValueError: with the reason.
        """
        require_at_least(self, {"bucket_mib": 0.001, "deadline_s": 0.001, "snapshots": 2})
        if self.quantised == "mxfp4":
            raise ValueError(
                "quantised is 'mxfp4': vLLM serves it by kernels of GPUs, or an emulation over "
                "amd-quark, and nobody makes such weights here; 'nvfp4' has four bits too"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchConfig:
    """How processes are kept alive.

    Attributes:
        restarts: how often each process, and the bundled Redis, is started again after it died; in
            jobs of SLURM those that others go on without: rollouts, teachers and elastic policies.
            One that has lived for an hour has all of them again.
        standbys: controllers that wait to take over from the one that has the lease.
        external: policy and rollout replicas are started by somebody else, such as SLURM, and join
            when the run is there.
        hung_s: a replica that lost its lease, ``bus.lease_s`` without progress, and does not come
            back for so long is killed, and started again, or ends itself on another machine. It is
            given longer where a reward, an environment, a turn on shared devices or a compiler may
            take it. A learner on given data, which has no lease, is if it is suspended for so long.
        start_s: a replica that takes longer from its start until it joins ends itself; that is to
            load its model, and for an engine to start and compile.
        save_s: a policy that writes a checkpoint or an export for longer ends itself, as one whose
            file system is gone; the run goes on from the newest checkpoint that is whole.
        stall_s: a learner on given data that is in one pass over its data, or in reading them, for
            longer ends itself, as one whose file system or whose other rank is gone; it is started
            again, and goes on from the newest checkpoint or from what others have. So is a warm-up.
        sink_s: longest that a sink may take for one record, or to be closed, when the run is over.
        stop_grace_s: time for a clean stop before processes are killed.
        preload: replicas of one process are forked from one that has imported what they need, so
            that they begin at once, also after a death, and share its memory.
    """

    restarts: int = 3
    standbys: int = 0
    external: bool = False
    hung_s: float = 120.0
    start_s: float = 3600.0
    save_s: float = 1800.0
    stall_s: float = 1800.0
    sink_s: float = 600.0
    stop_grace_s: float = 60.0
    preload: bool = True

    def __post_init__(self) -> None:
        require_at_least(self, {"restarts": 0, "standbys": 0, "hung_s": 0, "stop_grace_s": 0})
        for name in ("start_s", "save_s", "stall_s", "sink_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0, and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run.

    Attributes:
        kind: says that this is a run of reinforcement learning.
        seed: of everything random.
        output: the run directory.
        model: what is trained.
        data: on what.
        warmup: supervised fine-tuning before RL.
        algorithm: the RL loss.
        learner: optimizer, schedule and clipping of RL.
        trainer: its loop.
        policy: the replicas that train.
        elastic: how long policy replicas wait for each other, if they come and go while the others
            go on; without it one that dies takes all back to the last checkpoint.
        rollout: the replicas that generate.
        teacher: who scores for algorithms that learn from a teacher.
        reward: what is rewarded, and by how many processes in each rollout replica.
        length_reward: what the length of a response does to that; none if there is no table.
        staleness: how far sampling may run ahead of training.
        endurance: when a run ends that gets no further.
        validation: when accuracy is measured.
        weight_sync: how weights travel.
        bus: the control plane.
        launch: how processes are kept alive.
        cluster: what a run on many machines asks for.
        dashboard: the page and HTTP API that the controller serves.
        sinks: where metrics go.
    """

    kind: Literal["rl"] = "rl"
    seed: int = 0
    output: Path = Path("runs/run")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    algorithm: AlgorithmConfig = field(default_factory=GrpoConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    elastic: ElasticConfig | None = None
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    reward: RewardPoolConfig = field(default_factory=RewardPoolConfig)
    length_reward: LengthRewardConfig | None = None
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    endurance: EnduranceConfig = field(default_factory=EnduranceConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    sinks: tuple[SinkConfig, ...] = (ConsoleSinkConfig(), JsonlSinkConfig())

    def __post_init__(self) -> None:
        """Check the rules between sections.

        Raises:
            ValueError: naming the two settings that do not go together.
        """
        check_seed(self.seed)
        check_head(self.model.training)
        sampled, trained = self.rollout.sampling.temperature, self.algorithm.temperature
        if sampled != trained:
            raise ValueError(
                f"rollout.sampling.temperature is {sampled} and algorithm.temperature {trained}; "
                "log-probabilities are only comparable at one temperature"
            )
        quantised, engine = self.weight_sync.quantised, self.rollout.engine.kind
        if quantised and engine != "vllm":
            raise ValueError(
                f"weight_sync.quantised is {quantised!r} and rollout.engine.kind {engine!r}; "
                "only vllm serves quantised weights"
            )
        if not self.weight_sync.staged and (engine != "vllm" or self.model.training.lora):
            raise ValueError(
                f"weight_sync.staged is false and rollout.engine.kind {engine!r}; only vllm stands "
                "still while it fetches, and only for whole weights, not for adapters"
            )
        held = getattr(self.rollout.engine, "dtype", "auto")
        if quantised == "nvfp4" and held == "float32":
            raise ValueError(
                "weight_sync.quantised is 'nvfp4' and rollout.engine.dtype 'float32'; vllm serves "
                "it with auto, bfloat16 or float16"
            )
        if self.validation.every and self.data.has_no_held_out:
            raise ValueError(
                f"validation.every is {self.validation.every}, and there is nothing to validate "
                "on: set data.held_out or data.held_out_path, or validation.every=0"
            )
        if self.rollout.environment is None:
            check_judged(self.data, self.reward)
        if self.elastic is not None:
            check_elastic(self.elastic, self.policy)
        least_s = {
            "weight_sync.deadline_s": self.weight_sync.deadline_s,
            "launch.start_s": self.launch.start_s,
        }
        if self.launch.external:
            least_s["cluster.join_s"] = self.cluster.join_s
        check_standstill(self.endurance, least_s)
        check_nucleus(self.rollout, self.validation.top_p)
        check_colocation(self.rollout, self.staleness, num_policies=self.policy.replicas)
        self.policy.parallel.resolve(self.policy.ranks)
        _check_algorithm(self)
        num_updates = self.trainer.steps * self.algorithm.build().epochs
        self.learner.optimizer.schedule.check_updates(num_updates)


def _check_algorithm(recipe: Recipe) -> None:
    """Refuse an algorithm that needs what no rank of this run has.

    Raises:
        ValueError: naming the setting.
    """
    kind, algorithm = recipe.algorithm.kind, recipe.algorithm.build()
    check_learnable(
        algorithm,
        recipe.reward,
        num_samples=recipe.trainer.samples_per_group,
        is_played=recipe.rollout.environment is not None,
        length_kind="" if recipe.length_reward is None else recipe.length_reward.kind,
    )
    check_teacher(
        recipe.teacher,
        recipe.model.teacher,
        needed_by=kind if "teacher_logprobs" in algorithm.needs else "",
        temperature=recipe.algorithm.temperature,
        top_k=0 if algorithm.likeliest is None else algorithm.likeliest.top_k,
    )


def controller_config(recipe: Recipe, num_held_out: int) -> ControllerConfig:
    """Return the run as the controller sees it."""
    trainer = recipe.trainer
    return ControllerConfig(
        num_steps=trainer.steps,
        groups_per_step=trainer.groups_per_step,
        samples_per_group=trainer.samples_per_group,
        num_policies=recipe.policy.replicas,
        min_policies=0 if recipe.elastic is None else recipe.elastic.min_replicas,
        staleness=recipe.staleness,
        endurance=recipe.endurance,
        validation=recipe.validation.plan(num_held_out),
        checkpoint_every=trainer.checkpoint_every,
        drop_zero_signal=trainer.drop_zero_signal,
        min_group_samples=trainer.min_group_samples,
        lease_s=recipe.bus.lease_s,
        first_lease_s=max(recipe.bus.first_lease_s, recipe.bus.lease_s),
    )


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Raises:
        ConfigError: if the file or an override is not a recipe, with every problem in it.
    """
    return load_config(Recipe, path, overrides)
