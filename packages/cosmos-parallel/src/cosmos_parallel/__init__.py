"""Meshes, model loading, the learner and checkpoints: everything a policy replica trains with."""

from cosmos_parallel.checkpoint import Checkpoint, CheckpointStore, RetentionConfig
from cosmos_parallel.determinism import deterministic, seed_everything
from cosmos_parallel.elastic import ElasticReplicas, Seat
from cosmos_parallel.ema import Ema, EmaConfig
from cosmos_parallel.errors import (
    AdapterError,
    CheckpointError,
    CheckpointMismatchError,
    ExportError,
    FreezeError,
    LossContractError,
    MeshError,
    ModelMismatchError,
    ModelNotFoundError,
    NoBatchError,
    NonFiniteStepError,
    OptimizerError,
    PackingError,
    ParallelError,
    PictureError,
    PrecisionError,
    ReplicaLostError,
    SftDataError,
    TokenIdError,
)
from cosmos_parallel.export import HasHfNames, export_hf
from cosmos_parallel.families import (
    Implementation,
    ModelSupport,
    check_layout,
    supported_models,
)
from cosmos_parallel.generic_weights import num_parameters
from cosmos_parallel.learner import Learner, LearnerConfig
from cosmos_parallel.lora import LoraConfig, PeftView, adapter_tensors, add_lora, export_lora
from cosmos_parallel.lora_merge import load_weights, merge_directories, merged_weights
from cosmos_parallel.low_precision import LowPrecisionConfig, use_low_precision
from cosmos_parallel.membership import (
    Attendance,
    Attendee,
    ElasticConfig,
    Meeting,
    MeetingPlace,
    Membership,
    open_meeting_store,
)
from cosmos_parallel.mesh import ParallelConfig, TrainingMesh, build_mesh
from cosmos_parallel.models import (
    ModelConfig,
    check_model_directory,
    check_trainable,
    chosen_implementation,
    decoder_layers,
    load_causal_lm,
    read_config,
)
from cosmos_parallel.optimizer import (
    AdamW8bitConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
    TorchOptimizerConfig,
)
from cosmos_parallel.packed_attention import (
    check_packable,
    packed_sdpa,
    runs_packed_rows,
    use_packed_attention,
)
from cosmos_parallel.packing import balanced_parts, plan_micro_batches
from cosmos_parallel.passes import LossFunction, LossResult, Pass, TakesAllPasses, run_passes
from cosmos_parallel.pictures import BLANK_PICTURE, PictureReader
from cosmos_parallel.process import (
    ProcessContext,
    broadcast_bytes,
    init_distributed,
    open_store,
    shutdown_distributed,
)
from cosmos_parallel.replicas import ReplicaGroup, ReplicaMembership, StoreReplicaGroup
from cosmos_parallel.schedule import ScheduleConfig
from cosmos_parallel.sequences import gather_sequence
from cosmos_parallel.sft import (
    Answers,
    SftLoss,
    answer_logits,
    batch_sizes,
    fit,
    sft_loss,
    validate,
)
from cosmos_parallel.sft_batches import (
    SftBatch,
    SftBatchConfig,
    empty_batch,
    lay_out,
    step_batches,
    step_examples,
)
from cosmos_parallel.sft_data import SftFormat, encode_example, load_sft_data
from cosmos_parallel.sft_examples import SftData, SftExample
from cosmos_parallel.sft_rows import read_rows, read_rows_in
from cosmos_parallel.sharding import (
    copy_weights,
    model_tensors,
    reshard,
    shard_module,
    sum_gradients,
)
from cosmos_parallel.step_report import Evaluation, Outcome, StepReport
from cosmos_parallel.throughput import (
    ModelCost,
    Throughput,
    device_peak_flops,
    model_cost,
    throughput,
)
from cosmos_parallel.value_head import VALUE_HEAD, is_of_value_head
from cosmos_parallel.whole_steps import whole_step

__all__ = [
    "BLANK_PICTURE",
    "VALUE_HEAD",
    "AdamW8bitConfig",
    "AdamWConfig",
    "AdapterError",
    "Answers",
    "Attendance",
    "Attendee",
    "Checkpoint",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointStore",
    "ElasticConfig",
    "ElasticReplicas",
    "Ema",
    "EmaConfig",
    "Evaluation",
    "ExportError",
    "FreezeError",
    "HasHfNames",
    "Implementation",
    "Learner",
    "LearnerConfig",
    "LoraConfig",
    "LossContractError",
    "LossFunction",
    "LossResult",
    "LowPrecisionConfig",
    "Meeting",
    "MeetingPlace",
    "Membership",
    "MeshError",
    "ModelConfig",
    "ModelCost",
    "ModelMismatchError",
    "ModelNotFoundError",
    "ModelSupport",
    "MuonConfig",
    "NoBatchError",
    "NonFiniteStepError",
    "OptimizerConfig",
    "OptimizerError",
    "Outcome",
    "PackingError",
    "ParallelConfig",
    "ParallelError",
    "Pass",
    "PeftView",
    "PictureError",
    "PictureReader",
    "PrecisionError",
    "ProcessContext",
    "ReplicaGroup",
    "ReplicaLostError",
    "ReplicaMembership",
    "RetentionConfig",
    "ScheduleConfig",
    "Seat",
    "SftBatch",
    "SftBatchConfig",
    "SftData",
    "SftDataError",
    "SftExample",
    "SftFormat",
    "SftLoss",
    "SgdConfig",
    "StepReport",
    "StoreReplicaGroup",
    "TakesAllPasses",
    "Throughput",
    "TokenIdError",
    "TorchOptimizerConfig",
    "TrainingMesh",
    "adapter_tensors",
    "add_lora",
    "answer_logits",
    "balanced_parts",
    "batch_sizes",
    "broadcast_bytes",
    "build_mesh",
    "check_layout",
    "check_model_directory",
    "check_packable",
    "check_trainable",
    "chosen_implementation",
    "copy_weights",
    "decoder_layers",
    "deterministic",
    "device_peak_flops",
    "empty_batch",
    "encode_example",
    "export_hf",
    "export_lora",
    "fit",
    "gather_sequence",
    "init_distributed",
    "is_of_value_head",
    "lay_out",
    "load_causal_lm",
    "load_sft_data",
    "load_weights",
    "merge_directories",
    "merged_weights",
    "model_cost",
    "model_tensors",
    "num_parameters",
    "open_meeting_store",
    "open_store",
    "packed_sdpa",
    "plan_micro_batches",
    "read_config",
    "read_rows",
    "read_rows_in",
    "reshard",
    "run_passes",
    "runs_packed_rows",
    "seed_everything",
    "sft_loss",
    "shard_module",
    "shutdown_distributed",
    "step_batches",
    "step_examples",
    "sum_gradients",
    "supported_models",
    "throughput",
    "use_low_precision",
    "use_packed_attention",
    "validate",
    "whole_step",
]
