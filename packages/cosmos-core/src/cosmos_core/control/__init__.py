"""The controller: who does what next, decided without sockets, clock or chance."""

from cosmos_core.control.books import Books, BooksError
from cosmos_core.control.config import ControllerConfig, StalenessConfig, ValidationPlan
from cosmos_core.control.controller import ALL_DONE, Controller
from cosmos_core.control.state import ControllerState, StepStats, ValidationResult

__all__ = [
    "ALL_DONE",
    "Books",
    "BooksError",
    "Controller",
    "ControllerConfig",
    "ControllerState",
    "StalenessConfig",
    "StepStats",
    "ValidationPlan",
    "ValidationResult",
]
