"""The controller: who does what next, decided without sockets, clock or chance."""

from cosmos_core.control.books import Books, BooksError
from cosmos_core.control.config import ControllerConfig, StalenessConfig, ValidationPlan
from cosmos_core.control.controller import Controller
from cosmos_core.control.cut import line_of_cut, step_of_cut
from cosmos_core.control.ending import ALL_DONE, STOPPED
from cosmos_core.control.endurance import (
    DEADLY,
    EQUAL,
    FAILING,
    STANDSTILL,
    UNREWARDED,
    EnduranceConfig,
)
from cosmos_core.control.lone_round import LoneRound
from cosmos_core.control.payloads import payload_key
from cosmos_core.control.staleness import Load, StalenessPolicy, policy_of
from cosmos_core.control.state import (
    FAILURES_ALLOWED,
    ControllerState,
    StepStats,
    ValidationResult,
)
from cosmos_core.control.unusable import UNUSABLE

__all__ = [
    "ALL_DONE",
    "DEADLY",
    "EQUAL",
    "FAILING",
    "FAILURES_ALLOWED",
    "STANDSTILL",
    "STOPPED",
    "UNREWARDED",
    "UNUSABLE",
    "Books",
    "BooksError",
    "Controller",
    "ControllerConfig",
    "ControllerState",
    "EnduranceConfig",
    "Load",
    "LoneRound",
    "StalenessConfig",
    "StalenessPolicy",
    "StepStats",
    "ValidationPlan",
    "ValidationResult",
    "line_of_cut",
    "payload_key",
    "policy_of",
    "step_of_cut",
]
