"""Modules that ask for GPUs as they are imported get answers, and CUDA does not start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
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


def imports(folder: Path, gpus: str) -> subprocess.CompletedProcess[str]:
    """What a process prints that imports what asks, beside a command that tells of GPUs."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.run(
        [sys.executable, "-c", _IMPORTING],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_name_and_capability_are_told_without_cuda(tmp_path: Path) -> None:
    done = imports(tmp_path, "NVIDIA H200, 9.0\\nNVIDIA H200, 9.0\\n")
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
def test_without_one_answer_torch_is_asked(gpus: str, tmp_path: Path) -> None:
    done = imports(tmp_path, gpus)
    assert WITHOUT in done.stderr
    assert "kernels" in done.stderr
