"""A loop of somebody else under torchrun: DDP over two ranks steps as one process does.

Rows of different lengths are dealt out unevenly, so that a mean of means would be another gradient.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

# Weights are of the whole step; a rank takes its rows, and multiplies the loss by the number of
# ranks, by which DDP divides. Three steps of gradient descent; rank 0 writes weights and losses.
LOOP = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from cosmos_algos import (
    AggregationConfig, ObjectiveConfig, batch_of_targets, group_advantages, policy_objective,
    sample_weights, scores_from_logits,
)

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.manual_seed(0)
mode = sys.argv[1]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
wrapped = DistributedDataParallel(model)
ids, before = torch.randint(11, (6, 7)), torch.randint(11, (6, 7))
mask = torch.arange(7) < torch.tensor([7, 1, 3, 2, 6, 4])[:, None]
sampled = torch.full((6, 7), -2.4)
groups = ["a", "a", "a", "b", "b", "b"]
advantages = group_advantages("grpo", [1.0, 0.0, 0.5, 2.0, 0.0, 1.0], groups)
weights = sample_weights(mask.sum(1), groups, AggregationConfig(mode=mode))
rows = [[0, 1, 2, 3, 4, 5]] if ranks == 1 else [[0, 4], [1, 2, 3, 5]]
losses = []
for _ in range(3):
    mine = rows[rank]
    own = weights.select(mine)
    batch = batch_of_targets(ids[mine], mask[mine], sampled[mine], advantages[mine], own)
    scores = scores_from_logits(wrapped(before[mine]), ids[mine])
    part = policy_objective(scores, batch, ObjectiveConfig())
    denominator = own.denominator.sum()
    dist.all_reduce(denominator)
    loss = part.total / denominator
    (loss * ranks).backward()
    dist.all_reduce(loss := loss.detach())
    losses.append(float(loss))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
            parameter.grad = None
if rank == 0:
    found = {"losses": losses, "weights": [p.flatten().tolist() for p in model.parameters()]}
    open(sys.argv[2], "w").write(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # DDP keeps gloo's threads alive, and Python's end may abort a rank that has them
"""


def run(ranks: int, mode: str, folder: Path) -> dict:
    script, out = folder / "loop.py", folder / f"{ranks}.json"
    script.write_text(LOOP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", str(script), mode, str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "mode", ["token_mean", pytest.param("sequence_mean", marks=pytest.mark.thorough)]
)
def test_two_ranks_of_ddp_take_the_steps_of_one_process(mode, tmp_path):
    alone, together = run(1, mode, tmp_path), run(2, mode, tmp_path)
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-12)
    for found, wanted in zip(together["weights"], alone["weights"], strict=True):
        assert found == pytest.approx(wanted, abs=1e-12)
    assert alone["losses"][2] < alone["losses"][0]
