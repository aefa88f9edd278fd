"""Two ranks that share the tokens of a sample: velocity and gradients are those of one."""

import json

import pytest
from process_trees import run_ranks

DEADLINE_S = 240

WORKER = """
import copy, json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from cosmos_parallel import ParallelConfig, build_mesh, init_distributed, shutdown_distributed
from cosmos_wfm import (
    PipelineError, WfmConfigError, find_adapter, share_context, tiny_cosmos_pipeline,
    tiny_sana_pipeline, tiny_sana_video_pipeline, tiny_sd3_pipeline, tiny_wan_pipeline,
    tiny_wan_small_pipeline)

torch.set_num_threads(1)
rank, root = int(sys.argv[1]), Path(sys.argv[2])
process = init_distributed(rank, 2, init_method=f"file://{root}/store")
mesh = build_mesh(ParallelConfig(cp=2), process)

def adapted(pipeline):
    return find_adapter(type(pipeline).__name__)(pipeline)

def shared_copy(adapter):
    names = {id(module): name for name, module in adapter.transformer.named_modules()}
    shared = copy.deepcopy(adapter.transformer)
    share_context(shared, [shared.get_submodule(names[id(b)]) for b in adapter.blocks], mesh)
    return shared

def backward(adapter, transformer, frames, given):
    generator = torch.Generator().manual_seed(0)
    shape = adapter.latent_shape(frames, 32, 64)
    latents = torch.randn((2, *shape), generator=generator)
    mask = torch.zeros(2, 1, shape[1], 1, 1) if given else None
    if given:
        mask[0, :, :1] = 1.0
    text = adapter.encode_text(["a red square", "noise"])
    out = adapter.velocity(transformer, latents, torch.tensor([0.3, 0.8]), text, mask)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    return out.detach()

def difference(adapter, frames, given):
    whole, shared = adapter.transformer, shared_copy(adapter)
    whole.zero_grad()
    expected, out = (backward(adapter, each, frames, given) for each in (whole, shared))
    theirs = dict(shared.named_parameters())
    largest = worst = 0.0
    for name, parameter in whole.named_parameters():
        if parameter.grad is None:
            assert theirs[name].grad is None, name
            continue
        dist.all_reduce(theirs[name].grad)
        largest = max(largest, parameter.grad.abs().max().item())
        worst = max(worst, (theirs[name].grad / 2 - parameter.grad).abs().max().item())
    return (out - expected).abs().max().item() / expected.abs().max().item(), worst / largest

def refusal(call):
    try:
        call()
    except (PipelineError, WfmConfigError) as error:
        return str(error)

video = adapted(tiny_sana_video_pipeline())
found = {
    "sd3": difference(adapted(tiny_sd3_pipeline()), 1, False),
    "cosmos": difference(adapted(tiny_cosmos_pipeline()), 5, False),
    "cosmos, a frame given": difference(adapted(tiny_cosmos_pipeline()), 5, True),
    "wan": difference(adapted(tiny_wan_pipeline()), 5, False),
    "wan22": difference(adapted(tiny_wan_pipeline(num_layers=1, boundary=0.5)), 5, False),
    "wan22_small": difference(adapted(tiny_wan_small_pipeline(num_layers=1)), 5, False),
    "sana_video": difference(video, 13, False),
}
found["odd"] = refusal(lambda: backward(video, shared_copy(video), 9, False))
found["sana"] = refusal(lambda: shared_copy(adapted(tiny_sana_pipeline())))
if rank == 0:
    (root / "found.json").write_text(json.dumps(found))
shutdown_distributed()
"""


@pytest.mark.slow
def test_two_ranks_share_the_tokens_of_every_family(tmp_path):
    run_ranks(WORKER, tmp_path, [(rank, tmp_path) for rank in range(2)], DEADLINE_S)
    found = json.loads((tmp_path / "found.json").read_text())

    assert "3 latent frames cannot be divided among the 2 ranks of parallel.cp" in found.pop("odd")
    assert "there is no plan for SanaTransformer2DModel; there are plans for" in found.pop("sana")
    for name, (velocity, gradient) in found.items():
        # Linear attention adds its states up in another order; softmax attention is the same. Wan
        # 2.2's small form has two tokens a rank here, whose products round unlike those of four.
        assert velocity <= (1e-6 if name in {"sana_video", "wan22_small"} else 0.0), name
        assert gradient < 1e-5, name
