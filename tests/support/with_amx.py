"""Tests for processors with AMX, for which vLLM's kernels for blocks of FP8 on a CPU are."""

import pytest
import torch

HAS_AMX = torch.cpu._is_amx_tile_supported()
WITH_AMX = pytest.mark.skipif(not HAS_AMX, reason="vLLM's kernels for a CPU are of AMX")
