"""bfloat16 over float32 weights, modules that stay exact, and compiled blocks."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    LearnerConfig,
    ParallelConfig,
    ProcessContext,
    TrainingMesh,
    build_mesh,
    init_distributed,
    open_store,
    shutdown_distributed,
)
from cosmos_wfm import (
    ComputeConfig,
    DiffusionSftConfig,
    FullTuning,
    ImageCaptionsConfig,
    LoraTuning,
    WfmConfigError,
    float32_modules,
    load_adapter,
    shard_denoiser,
    train_sft,
)

LOW = ComputeConfig(dtype="bfloat16")
ALONE = TrainingMesh(ParallelConfig().resolve(1), ProcessContext(), None)
"""This process without a group, whether or not another test has one."""


@pytest.fixture(scope="module")
def mesh():
    """One rank with a process group, which FSDP2 needs."""
    yield build_mesh(
        ParallelConfig(), init_distributed(0, 1, store=open_store("127.0.0.1", 0, hosting=True))
    )
    shutdown_distributed()


@pytest.fixture
def recipe(model_dir, data_dir, tmp_path):
    return DiffusionSftConfig(
        model=str(model_dir),
        data=ImageCaptionsConfig(path=str(data_dir), height=16, width=16),
        output=str(tmp_path / "out"),
        num_steps=3,
        batch_size=2,
        micro_batch_size=2,
        tuning=FullTuning(),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=1e-5)),
    )


def trained(recipe, mesh=None):
    losses = []
    directory = train_sft(
        recipe, mesh=mesh, on_step=lambda step, report, figures: losses.append(report.loss)
    )
    return directory, losses


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(4, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def test_modules_are_kept_by_parts_of_their_path_and_a_name_of_none_is_refused():
    module = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])})
    first, second = module["blocks"]

    assert float32_modules(module, ()) == []
    assert float32_modules(module, ("norm2",)) == [first.norm2, second.norm2]
    # The outermost only, and none of "norm": a name is a whole part of a path.
    assert float32_modules(module, ("inner", "1")) == [first.inner, second]
    for name in ("LayerNorm", "norm", "norm1"):  # a class, half a name, one without weights
        with pytest.raises(WfmConfigError, match=f"keep_float32 names {name}, but no module"):
            float32_modules(module, (name,))


def test_wans_own_list_is_kept(model_dirs):
    transformer = load_adapter(model_dirs("wan")).transformer
    kept = float32_modules(transformer, ())

    assert transformer.condition_embedder.time_embedder in kept
    assert transformer.blocks[0].norm2 in kept


def test_updates_far_below_bfloat16s_grain_are_kept(recipe, mesh, model_dir):
    _, exact = trained(recipe, ALONE)
    directory, low = trained(replace(recipe, output=recipe.output + "-low", compute=LOW), mesh)
    name = "transformer/diffusion_pytorch_model.safetensors"
    before, after = load_file(model_dir / name), load_file(directory / name)

    assert low == pytest.approx(exact, rel=0.02)
    assert low != exact
    before, after = (
        torch.cat([state[key].flatten() for key in sorted(state)]) for state in (before, after)
    )
    moved = (after - before).abs()
    assert after.dtype == torch.float32
    assert 1e-6 < moved.max() < 4e-5  # three steps of about 1e-5
    large = before.abs() > 0.02  # where bfloat16's steps are 1.2e-4 and more
    assert (moved[large] > 0).float().mean() > 0.6  # the rest has no gradient
    assert (moved[large] < before.abs()[large] / 256).all()


def test_every_family_computes_in_bfloat16_but_for_timesteps_and_what_is_kept(
    family, model_dirs, mesh
):
    adapter, exact = load_adapter(model_dirs(family)), load_adapter(model_dirs(family))
    LoraTuning(rank=2).prepare(adapter, seed=0)
    adapter.transformer.requires_grad_(True)
    names = {"wan": "norm2", "sd3": "time_text_embed"}
    keep = (names.get(family.partition("22")[0], "time_embed"),)
    kept = float32_modules(adapter.transformer, keep)
    seen = {}

    def watch(name):
        def hook(module, arguments, named):
            inputs = [*arguments, *named.values()]
            found = [v.dtype for v in inputs if torch.is_tensor(v) and v.is_floating_point()]
            weight = next(module.parameters())
            seen.setdefault(name, set()).update([*found[:1], weight.dtype])

        return hook

    shard_denoiser(adapter.transformer, adapter.blocks, mesh, replace(LOW, keep_float32=keep))
    kept[0].register_forward_pre_hook(watch("kept"), with_kwargs=True)
    adapter.blocks[0].register_forward_pre_hook(watch("block"), with_kwargs=True)
    frames = 5 if adapter.temporal_factor else 1
    shape = adapter.latent_shape(frames, 32, 32)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, *shape, generator=generator)
    sigmas, text = torch.tensor([0.999]), adapter.encode_text(["a red square"])
    low = adapter.velocity(adapter.transformer, latents, sigmas, text)
    low.square().sum().backward()
    with torch.no_grad():
        high = exact.velocity(
            exact.transformer, latents, sigmas, exact.encode_text(["a red square"])
        )

    assert low.dtype == torch.float32
    assert seen == {"kept": {torch.float32}, "block": {torch.bfloat16}}
    assert (low - high).norm() < 0.03 * high.norm()
    gradients = [p.grad.dtype for p in adapter.transformer.parameters() if p.grad is not None]
    assert set(gradients) == {torch.float32}


def test_bfloat16_without_a_group_and_settings_without_effect_are_refused(recipe):
    with pytest.raises(WfmConfigError, match="needs FSDP2"):
        trained(replace(recipe, compute=LOW), ALONE)
    with pytest.raises(WfmConfigError, match="keep_float32 means something with"):
        ComputeConfig(keep_float32=("norm2",))
    with pytest.raises(WfmConfigError, match="there is no backend inductr"):
        ComputeConfig(compile="inductr")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_give_the_same_losses(recipe):
    _, plain = trained(recipe, ALONE)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = replace(recipe, output=recipe.output + "-c", compute=ComputeConfig(compile="eager"))

    assert trained(compiled, ALONE)[1] == pytest.approx(plain, abs=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, values):
        return self.factor * values


@pytest.mark.parametrize(("recomputes", "num_graphs"), [(False, 2), (True, 3)])
def test_compiled_blocks_that_are_computed_again_have_a_graph_for_each_size(recomputes, num_graphs):
    # one for any size, which comes up at the second, would save other tensors than the first did
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = nn.Sequential(Doubling())
    module.gradient_checkpointing = recomputes
    shard_denoiser(module, [module[0]], ALONE, ComputeConfig(compile="eager"))

    for size in (2, 3, 4):
        module(torch.ones(size, 4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs
