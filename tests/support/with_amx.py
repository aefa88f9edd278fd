"""Tests for processors with AMX, for which vLLM's kernels for blocks of FP8 on a CPU are."""

import torch
from capabilities import needs

WITH_AMX = needs("amx", torch.cpu._is_amx_tile_supported())
