"""Modules that ask for GPUs as they are imported get answers, and CUDA does not start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_app.gpu_answers import answering_for_gpus

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

# A torch without CUDA fails where one with it would start it.
_IMPORTING = """
import sys
import torch
from torch._dynamo import device_interface
from cosmos_app.gpu_answers import answering_for_gpus

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
kept = torch.cuda.get_device_properties, torch.cuda.current_device
with answering_for_gpus():
    from torchao.prototype.mx_formats import kernels
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(0))
    told = torch.cuda.get_device_properties("cuda:0")
    late = torch.cuda.get_device_properties
    print(len(device_interface.caching_worker_device_properties))
    try:
        told.total_memory
    except AssertionError as error:
        print(error)
print((torch.cuda.get_device_properties, torch.cuda.current_device) == kept)
print(device_interface.caching_worker_device_properties, torch.cuda.is_initialized())
try:
    late()
except AssertionError as error:
    print(error)
"""
WITHOUT = "Torch not compiled with CUDA enabled"


def have_told(folder: Path, gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a command there that tells of GPUs."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_name_and_capability_are_told_without_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_told(tmp_path, "NVIDIA H200, 9.0\\nNVIDIA H200, 9.0\\n", monkeypatch)
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "NVIDIA H200 (9, 0)",
        "1",
        WITHOUT,
        "True",
        "{} False",
        WITHOUT,
    ], done.stderr


@pytest.mark.parametrize(
    "gpus", ["", "NVIDIA H200, 9.0\\nNVIDIA L4, 8.9\\n", "No devices were found\\n", "?, [N/A]\\n"]
)
def test_without_one_answer_torch_is_asked(
    gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_told(tmp_path, gpus, monkeypatch)
    asked = torch.cuda.get_device_properties, torch.cuda.current_device
    with answering_for_gpus():
        assert (torch.cuda.get_device_properties, torch.cuda.current_device) == asked
