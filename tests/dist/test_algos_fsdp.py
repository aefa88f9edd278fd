"""Scores taken inside the forward pass of a model on two ranks: they give one's gradient.

With and without a cap on logits, which the model applies behind its head.
"""

import json

from process_trees import run_ranks

DEADLINE_S = 120

# Each rank scores its own rows and FSDP2 sums gradients over ranks, or both score the same rows by
# the halves of an output head; rank 0 writes the largest error.
WORKER = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from cosmos_algos import DapoConfig, empty_batch, policy_loss
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)  # the reference takes the whole logits
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]

class Output(NamedTuple):  # FSDP2 finds tensors in containers that pytree knows
    logits: torch.Tensor

class Model(nn.Module):
    def __init__(self, tied, cap=None):
        super().__init__()
        text = SimpleNamespace(final_logit_softcapping=cap)
        self.config = SimpleNamespace(model_type="gemma2", get_text_config=lambda: text)
        self.cap = cap
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        logits = self.head(hidden)
        return Output(logits if self.cap is None else (logits / self.cap).tanh() * self.cap)

def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(13, (2, 5 + seed), generator=generator)
    kept = torch.rand(ids.shape, generator=generator) < 0.6
    return replace(
        empty_batch(), token_ids=ids, valid=ids >= 0, targets=ids.roll(-1, 1), trainable=kept,
        behaviour_logprobs=-2.5 * kept, advantages=torch.randn(ids.shape, generator=generator),
        token_weights=kept.float(), denominators=kept.sum(1).double(), lags=torch.zeros_like(ids),
    )

def compare(tied, reshard, head_alone, mine, cap):
    loss = policy_loss(DapoConfig(logprob_chunk=3))
    whole = Model(tied, cap)
    for seed in (0, 1) if mine is not None else (0,):
        policy_loss(DapoConfig(logprob_chunk=0))(whole, batch(seed)).total.backward()
    model = Model(tied, cap)
    if head_alone:
        fully_shard(model.head, mesh=mesh, reshard_after_forward=True)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    share = batch(rank) if mine is not None or rank == 0 else empty_batch()
    loss(model, share).total.backward()
    errors = [
        (theirs.grad - ours.grad.full_tensor()).abs().max().item()
        for theirs, ours in zip(whole.parameters(), model.parameters(), strict=True)
    ]
    return max(errors)

def compare_split_head(cap):
    whole, model = Model(tied=False, cap=cap), Model(tied=False, cap=cap)
    parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))
    totals = [
        policy_loss(DapoConfig(logprob_chunk=chunk))(each, batch(0)).total
        for each, chunk in ((whole, 0), (model, 3))
    ]
    for total in totals:
        total.backward()
    grads = [
        (theirs.grad, ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad)
        for theirs, ours in zip(whole.parameters(), model.parameters(), strict=True)
    ]
    return max((a - b).abs().max().item() for a, b in [*grads, totals])

dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
errors = {
    f"tied={tied} reshard={reshard} head_alone={alone} both={both} cap={cap}":
        compare(tied, reshard, alone, True if both else None, cap)
    for cap in (None, 0.5)
    for tied, reshard, alone, both in [
        (False, None, False, True), (False, True, False, True), (False, True, True, True),
        (True, None, False, True), (True, True, False, True),
        (False, None, False, False), (True, True, False, False),
    ]
}
for cap in (None, 0.5):
    errors[f"split head cap={cap}"] = compare_split_head(cap)
if rank == 0:
    open(out, "w").write(json.dumps(errors))
dist.destroy_process_group()
"""


def test_two_ranks_give_the_gradient_of_one(tmp_path):
    ranks = [(rank, tmp_path / "store", tmp_path / "out.json") for rank in range(2)]
    run_ranks(WORKER, tmp_path, ranks, DEADLINE_S)

    errors = json.loads((tmp_path / "out.json").read_text())
    assert len(errors) == 16
    assert max(errors.values()) < 1e-9, errors
