"""Typed configuration: frozen dataclasses, read once from TOML, with overrides and good errors.

A config class is a frozen, keyword-only, slotted dataclass; its docstring documents each field in
an "Attributes:" section; ``__post_init__`` raises ValueError for values that do not go together.
"""

from cosmos_core.config.changed import changed_keys, count_keys
from cosmos_core.config.describe import FieldDoc, TableDoc, describe_config, describe_table
from cosmos_core.config.errors import ConfigError, ConfigProblem
from cosmos_core.config.json_schema import json_schema
from cosmos_core.config.load import config_from_json, config_to_json, load_config

__all__ = [
    "ConfigError",
    "ConfigProblem",
    "FieldDoc",
    "TableDoc",
    "changed_keys",
    "config_from_json",
    "config_to_json",
    "count_keys",
    "describe_config",
    "describe_table",
    "json_schema",
    "load_config",
]
