"""Which models can be trained, by whose implementation, and on which parallel axes."""

import json
from dataclasses import asdict

import click

from cosmos_parallel import ModelSupport, supported_models

_ALWAYS = ("dp_replicate", "dp_shard")


def show_models(*, as_json: bool) -> int:
    """Print every model type; return the exit code."""
    if as_json:
        click.echo(json.dumps([asdict(support) for support in supported_models()], indent=2))
    else:
        click.echo(models_as_text())
    return 0


def models_as_text() -> str:
    """Return a table of all model types: torchtitan's own, then those of transformers."""
    supported = supported_models()
    native = [support for support in supported if support.native]
    generic = [support for support in supported if not support.native]
    lines = [
        "Every model has dp_shard (FSDP2) and dp_replicate (DDP, HSDP); the table says what else."
    ]
    lines += ["", "torchtitan's implementation, or that of transformers:", *_rows(native)]
    lines += ["", "that of transformers:", *_rows(generic)]
    return "\n".join(lines)


def _rows(supported: list[ModelSupport]) -> list[str]:
    width = max(len(support.model_type) for support in supported)
    return [
        f"  {support.model_type:{width}}  "
        f"{' '.join(axis for axis in support.axes if axis not in _ALWAYS) or '-':14}  "
        f"{support.families if support.families != support.model_type else ''}".rstrip()
        for support in supported
    ]
