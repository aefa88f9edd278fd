"""Writing a pipeline without the stand-ins that it may hold."""

from pathlib import Path
from typing import Any

from cosmos_parallel import share_tensor_files
from cosmos_wfm.families.cosmos_predict import NoSafetyChecker


def save_pipeline(pipeline: Any, directory: str | Path) -> None:
    """Write a pipeline directory; a safety checker that lets everything pass is left out.

    Args:
        pipeline: a diffusers pipeline.
        directory: where to.
    """
    checker = getattr(pipeline, "safety_checker", None)
    if isinstance(checker, NoSafetyChecker):
        pipeline.register_modules(safety_checker=None)
    try:
        pipeline.save_pretrained(directory)
        share_tensor_files(Path(directory))
    finally:
        if checker is not None:
            pipeline.register_modules(safety_checker=checker)
