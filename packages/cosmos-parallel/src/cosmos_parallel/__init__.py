"""Meshes, model loading, the learner and checkpoints: everything a policy replica trains with."""

from cosmos_parallel.errors import (
    CheckpointError,
    ExportError,
    LossContractError,
    MeshError,
    ModelMismatchError,
    ModelNotFoundError,
    NoBatchError,
    NonFiniteStepError,
    ParallelError,
    ReplicaLostError,
    SftDataError,
)
from cosmos_parallel.learner import (
    Learner,
    LearnerConfig,
    LossFunction,
    LossResult,
    Outcome,
    StepReport,
)
from cosmos_parallel.mesh import ParallelConfig, TrainingMesh, build_mesh
from cosmos_parallel.models import (
    ModelConfig,
    check_model_directory,
    decoder_layers,
    load_causal_lm,
)
from cosmos_parallel.optimizer import AdamWConfig, OptimizerConfig, ScheduleConfig, SgdConfig
from cosmos_parallel.process import (
    ProcessContext,
    init_distributed,
    open_store,
    shutdown_distributed,
)
from cosmos_parallel.replicas import ReplicaGroup, ReplicaMembership, StoreReplicaGroup
from cosmos_parallel.sharding import shard_module

__all__ = [
    "AdamWConfig",
    "CheckpointError",
    "ExportError",
    "Learner",
    "LearnerConfig",
    "LossContractError",
    "LossFunction",
    "LossResult",
    "MeshError",
    "ModelConfig",
    "ModelMismatchError",
    "ModelNotFoundError",
    "NoBatchError",
    "NonFiniteStepError",
    "OptimizerConfig",
    "Outcome",
    "ParallelConfig",
    "ParallelError",
    "ProcessContext",
    "ReplicaGroup",
    "ReplicaLostError",
    "ReplicaMembership",
    "ScheduleConfig",
    "SftDataError",
    "SgdConfig",
    "StepReport",
    "StoreReplicaGroup",
    "TrainingMesh",
    "build_mesh",
    "check_model_directory",
    "decoder_layers",
    "init_distributed",
    "load_causal_lm",
    "open_store",
    "shard_module",
    "shutdown_distributed",
]
