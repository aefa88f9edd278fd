"""Where cosmos_guardrail is installed, generation with an export asks it; training never does."""

import os
import subprocess
import sys

import pytest

from cosmos_wfm import FullTuning, load_adapter

# What diffusers imports of the package (CosmosSafetyChecker), with the checks that it calls.
_PACKAGE = """
import torch

class CosmosSafetyChecker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("place", torch.zeros(1))
        self.asked = []

    @property
    def device(self):
        return self.place.device

    @property
    def dtype(self):
        return self.place.dtype

    def check_text_safety(self, prompt):
        self.asked.append(prompt)
        return "weapon" not in prompt

    def check_video_safety(self, frames):
        self.asked.append(frames.shape)
        return frames
"""

_GENERATION = """
import sys
import torch
import cosmos_wfm.loading
from cosmos_wfm.families.cosmos_predict import resize_without_torchvision
from diffusers import DiffusionPipeline
torch.set_num_threads(1)
assert type(cosmos_wfm.loading.load_adapter(sys.argv[1]).pipeline.safety_checker).__name__ == (
    "NoSafetyChecker")  # training does not ask
resize_without_torchvision()
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], local_files_only=True)
pipeline.set_progress_bar_config(disable=True)
small = dict(height=32, width=32, num_frames=5, num_inference_steps=1, output_type="np")
small["generator"] = torch.Generator().manual_seed(0)
pipeline(prompt="a red square", **small)
asked = pipeline.safety_checker.asked
assert asked[0] == "a red square" and asked[-1] == (5, 32, 32, 3), asked
try:
    pipeline(prompt="a weapon", **small)
except ValueError as error:
    sys.stdout.write(f"refused: {error}")
"""


@pytest.mark.slow
def test_generation_asks_the_guardrail_where_it_is_installed(model_dirs, tmp_path):
    adapter = load_adapter(model_dirs("cosmos"))
    FullTuning().save(adapter, tmp_path / "exported", writes=True)
    package = tmp_path / "site" / "cosmos_guardrail"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE)
    information = tmp_path / "site" / "cosmos_guardrail-0.3.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cosmos_guardrail\nVersion: 0.3.2\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), *[entry for entry in sys.path if entry]])
    ran = subprocess.run(
        [sys.executable, "-c", _GENERATION, str(tmp_path / "exported")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.startswith("refused:"), ran.stdout
