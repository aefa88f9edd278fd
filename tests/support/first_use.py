"""Modules that are imported in the middle of a first step, for who forks ranks that take it."""

import importlib

_AT_FIRST_USE = (
    "cosmos_parallel.native.building",
    "torchtitan.trainer",
    "peft",
    "transformers.tokenization_mistral_common",
)


def import_for_ranks() -> None:
    """Import them here, and not in each rank that is forked from this process."""
    for module in _AT_FIRST_USE:
        importlib.import_module(module)
