"""The controller: who does what next, decided without sockets, clock or chance."""

from cosmos_core.control.books import Books, BooksError
from cosmos_core.control.config import ControllerConfig, StalenessConfig, ValidationPlan
from cosmos_core.control.controller import ALL_DONE, STOPPED, Controller
from cosmos_core.control.staleness import Load, StalenessPolicy, policy_of
from cosmos_core.control.state import (
    FAILURES_ALLOWED,
    ControllerState,
    StepStats,
    ValidationResult,
)

__all__ = [
    "ALL_DONE",
    "FAILURES_ALLOWED",
    "STOPPED",
    "Books",
    "BooksError",
    "Controller",
    "ControllerConfig",
    "ControllerState",
    "Load",
    "StalenessConfig",
    "StalenessPolicy",
    "StepStats",
    "ValidationPlan",
    "ValidationResult",
    "policy_of",
]
