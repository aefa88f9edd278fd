"""Losses in somebody's own loop under DDP: two processes have the gradients of one."""

import json

import pytest
from process_trees import run_ranks

DEADLINE_S = 240

WORKER = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.nn.parallel import DistributedDataParallel
from cosmos_wfm import (
    CopiedPolicies, DdrlBatch, DdrlConfig, FlowBatch, FlowGrpoConfig, FlowMatchingConfig,
    ForwardBatch, Guidance, LoraPolicies, NftConfig, SdeConfig, StepBatch, adapt_pipeline,
    ddrl_loss, flow_matching_loss, flow_schedule, guided_velocity, nft_loss, sample_ode,
    sample_sde, tiny_sd3_pipeline, tiny_wan_pipeline)

torch.set_num_threads(1)
rank, world_size, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
if world_size > 1:
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size)
mine = slice(rank, None, world_size)
PROMPTS = ["a red square", "a blue disc"]

def fresh(make):
    torch.manual_seed(0)
    adapter = adapt_pipeline(make(num_layers=1))
    for part in adapter.pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    return adapter

def wrapped(module):
    return DistributedDataParallel(module) if world_size > 1 else module

def noise_of(adapter, seed):
    shape = adapter.latent_shape(1 if not adapter.temporal_factor else 5, 32, 32)
    generators = [torch.Generator().manual_seed(seed + n) for n in range(2)][mine]
    return torch.stack([torch.randn(shape, generator=g) for g in generators]), generators

def gradients(module, parts):
    loss = sum(part.total for part in parts)
    # DDP takes the mean over ranks of what each is the sum of
    (loss * world_size / (2 * len(parts))).backward()
    return {n: p.grad.norm().item() for n, p in module.named_parameters() if p.grad is not None}

def nft():
    adapter = fresh(tiny_sd3_pipeline)
    denoiser = adapter.transformer
    targets = list(adapter.lora_targets)
    denoiser.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    policies = LoraPolicies(adapter)
    with torch.no_grad():
        for name, weight in denoiser.named_parameters():
            if "lora_B.default" in name:
                weight.fill_(0.01)
    model = wrapped(denoiser)
    text = adapter.encode_text(PROMPTS[mine])
    noise, _ = noise_of(adapter, 0)
    with policies.old() as old:
        latents = sample_ode(
            lambda x, s: adapter.velocity(old, x, s, text), noise, flow_schedule(3, adapter.shift))
    loss = nft_loss(adapter, NftConfig(kl=0.1), policies)
    num = len(latents)
    batches = [
        ForwardBatch(
            latents=latents, noise=noise_of(adapter, 10)[0], sigmas=torch.full((num,), level),
            text=text, advantages=torch.tensor([1.0, -0.5])[mine], weights=torch.ones(num))
        for level in (0.9, 0.4)]
    return gradients(denoiser, [loss(model, batch) for batch in batches])

def ddrl():
    adapter = fresh(tiny_wan_pipeline)
    denoiser = adapter.transformer.requires_grad_(True)
    policies = CopiedPolicies(adapter, old=False, reference=True)
    model = wrapped(denoiser)
    text = adapter.encode_text(PROMPTS[mine])
    noise, generators = noise_of(adapter, 0)
    num = len(noise)
    negative, guidance = adapter.encode_negative(num), Guidance(4.5)
    latents, steps = sample_sde(
        lambda x, s: guided_velocity(adapter, model, (x, s), text, negative, guidance),
        noise, flow_schedule(3, adapter.shift), SdeConfig(), generators)
    loss = ddrl_loss(adapter, DdrlConfig(data_weight=0.5), policies)
    ones = torch.ones(num)
    batches = [
        DdrlBatch(
            steps=StepBatch(
                latents=step.latents, following=step.following, sigmas=step.sigma * ones,
                next_sigmas=step.next_sigma * ones, noise_levels=step.noise_level * ones,
                log_probs=step.log_probs, text=text, negative=negative, guidance=guidance,
                advantages=torch.tensor([1.0, -0.5])[mine], weights=ones),
            data=FlowBatch(
                latents=latents, noise=noise_of(adapter, 10)[0], sigmas=0.5 * ones, text=text,
                weights=ones))
        for step in steps]
    return gradients(denoiser, [loss(model, batch) for batch in batches])

found = {"nft": nft(), "ddrl": ddrl()}
if rank == 0:
    (root / f"gradients{world_size}.json").write_text(json.dumps(found))
if world_size > 1:
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ddp_of_two_processes_has_the_gradients_of_one(tmp_path):
    run_ranks(WORKER, tmp_path, [(0, 1, tmp_path)], DEADLINE_S)
    run_ranks(WORKER, tmp_path, [(rank, 2, tmp_path) for rank in range(2)], DEADLINE_S)

    one, two = (json.loads((tmp_path / f"gradients{n}.json").read_text()) for n in (1, 2))
    for name in one:
        assert one[name]
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
