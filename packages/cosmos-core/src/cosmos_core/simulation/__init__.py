"""The asynchronous system in virtual time, and the log that it shares with real runs."""

from cosmos_core.simulation.diary import Diary
from cosmos_core.simulation.figures import Capacity, Figures, Spread, TooShortError, figures_of
from cosmos_core.simulation.log import (
    Activity,
    LogRecord,
    QueueDepths,
    Span,
    StepTaken,
    TrainedSample,
    encode_log,
    read_log,
    step_taken,
    write_log,
)
from cosmos_core.simulation.simulator import SimulationError, simulate
from cosmos_core.simulation.workload import (
    CONTROLLER,
    POLICY,
    EngineSpeed,
    LengthConfig,
    Outage,
    SystemConfig,
    generate_bound_s,
    step_bound_s,
)

__all__ = [
    "CONTROLLER",
    "POLICY",
    "Activity",
    "Capacity",
    "Diary",
    "EngineSpeed",
    "Figures",
    "LengthConfig",
    "LogRecord",
    "Outage",
    "QueueDepths",
    "SimulationError",
    "Span",
    "Spread",
    "StepTaken",
    "SystemConfig",
    "TooShortError",
    "TrainedSample",
    "encode_log",
    "figures_of",
    "generate_bound_s",
    "read_log",
    "simulate",
    "step_bound_s",
    "step_taken",
    "write_log",
]
