"""What a run says of its speed: operations and tokens of passes, seconds of parts, memory."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from cosmos_parallel import AdamWConfig, LearnerConfig
from cosmos_wfm import (
    DdrlConfig,
    DiffusionRlConfig,
    DiffusionSftConfig,
    FlowGrpoConfig,
    FullTuning,
    ImageCaptionsConfig,
    LoraTuning,
    NftConfig,
    SamplerConfig,
    load_adapter,
    train_rl,
    train_sft,
)
from cosmos_wfm.passes import PassMeter
from cosmos_wfm.speed import peak_memory_mib
from cosmos_wfm.tuning import recompute_blocks

TOKENS, WIDTH = 6, 8
"""Of two samples with three tokens each."""
LINEAR = 2 * TOKENS * WIDTH * WIDTH
ATTENTION = 2 * 2 * 2 * 3 * 3 * WIDTH  # two products of B 2, 3 x 3 pairs, width 8


class Denoiser(nn.Module):
    """One block: a matrix, attention, a matrix."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden_states):
        if hidden_states.isnan().any():
            raise ValueError("not a number")
        return self.block(hidden_states)


class Attention(nn.Module):
    def forward(self, hidden):
        one = hidden[:, None]
        return scaled_dot_product_attention(one, one, one)[:, 0]


@pytest.fixture
def denoiser():
    return Denoiser()


@pytest.fixture
def meter(denoiser):
    return PassMeter([(denoiser, [denoiser.block])])


INPUTS = torch.ones(2, 3, WIDTH)


def test_a_trained_pass_counts_three_times_and_one_without_gradient_once(denoiser, meter):
    with torch.no_grad():
        denoiser(INPUTS)
    looking = meter.take()
    for _ in range(2):
        denoiser(hidden_states=INPUTS).sum().backward()
    trained = meter.take()

    assert (looking.flops, looking.tokens) == (2 * LINEAR + ATTENTION, 0)
    assert (trained.flops, trained.tokens) == (2 * 3 * (2 * LINEAR + ATTENTION), 2 * TOKENS)
    assert meter.take().flops == 0


def test_each_shape_is_counted_by_itself(denoiser, meter):
    denoiser(INPUTS[:1])
    denoiser(INPUTS)
    assert meter.take().flops == 3 * 1.5 * (2 * LINEAR + ATTENTION)


def test_a_pass_that_fails_leaves_nothing_behind(denoiser, meter):
    with pytest.raises(ValueError, match="not a number"):
        denoiser(INPUTS[:, :2] * math.nan)
    meter.take()
    denoiser(INPUTS)
    assert meter.take().flops == 3 * (2 * LINEAR + ATTENTION)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_are_counted_and_compiled_once(denoiser, meter):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    denoiser.block.compile(backend="eager")
    graphs = []
    for _ in range(3):
        denoiser(INPUTS)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == 0, "the pass that is looked at"
    assert graphs[1] == graphs[2] > 0
    passes = meter.take()
    assert (passes.flops, passes.tokens) == (9 * (2 * LINEAR + ATTENTION), 3 * TOKENS)


@pytest.mark.parametrize("family", ["sd3", "sana", "sana_video", "cosmos", "wan", "wan22"])
def test_families_are_counted_as_torchs_own_counter_does_without_fused_attention(
    family, model_dirs
):
    adapter = load_adapter(model_dirs(family))
    meter = PassMeter([(adapter.transformer, adapter.blocks)])
    shape = adapter.latent_shape(1 if adapter.temporal_factor == 0 else 5, 32, 32)
    text = adapter.encode_text(["a red square"])
    inputs = (torch.randn(1, *shape), torch.tensor([0.5]), text)
    adapter.velocity(adapter.transformer, *inputs)
    passes = meter.take()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        adapter.velocity(adapter.transformer, *inputs)

    assert passes.flops == 3 * counter.get_total_flops() > 0
    assert passes.tokens > 0


def test_what_is_computed_again_for_the_backward_pass_is_not_the_models(model_dirs):
    counted = []
    for recomputes in (False, True):
        adapter = load_adapter(model_dirs("sd3"))
        FullTuning().prepare(adapter, seed=0)
        if recomputes:
            adapter.transformer.train()
            recompute_blocks(adapter)
        meter = PassMeter([(adapter.transformer, adapter.blocks)])
        shape, text = adapter.latent_shape(1, 16, 16), adapter.encode_text(["a red square"])
        for _ in range(2):
            latents = torch.randn(1, *shape)
            velocity = adapter.velocity(adapter.transformer, latents, torch.tensor([0.5]), text)
            velocity.sum().backward()
        counted.append(meter.take())
    assert counted[0] == counted[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_that_are_computed_again_are_counted_in_a_step_without_compiling(
    model_dirs,
):
    adapter = load_adapter(model_dirs("sd3"))
    FullTuning().prepare(adapter, seed=0)
    adapter.transformer.train()
    recompute_blocks(adapter)
    meter = PassMeter([(adapter.transformer, adapter.blocks)])
    for block in adapter.blocks:
        block.compile(backend="aot_eager", dynamic=False)
    text = adapter.encode_text(["a red square"])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def velocity(size):
        latents = torch.zeros(1, *adapter.latent_shape(1, size, size))
        return adapter.velocity(adapter.transformer, latents, torch.tensor([0.5]), text)

    def trained(*sizes):
        sum(velocity(size).sum() for size in sizes).backward()
        return meter.take().flops

    first = trained(16)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert trained(16) == first
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    with torch.no_grad():
        velocity(16)
    assert 3 * meter.take().flops == first > 0
    # another size is first seen behind one that is known, whose backward pass is still to come
    assert trained(16, 32) == 0
    both = trained(16, 32)
    assert both > 2 * first
    assert trained(16, 32) == both


@pytest.fixture
def rl(model_dirs, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red square\na blue disc\n")
    return DiffusionRlConfig(
        model=str(model_dirs("sd3")),
        prompts=str(tmp_path / "prompts.txt"),
        output=str(tmp_path / "out"),
        rewards={"brightness": 1.0},
        num_steps=2,
        groups_per_step=2,
        samples_per_group=2,
        sampler=SamplerConfig(num_steps=3, height=16, width=16),
        tuning=LoraTuning(rank=2, alpha=4),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=1e-4)),
    )


def taken(train, recipe):
    steps = []
    train(recipe, on_step=lambda step, report, figures: steps.append((report, figures)))
    return steps


PARTS = {"sample_s", "reward_s", "wait_s", "data_s", "train_s"}


@pytest.mark.parametrize("algorithm", [NftConfig(), FlowGrpoConfig(), DdrlConfig()])
def test_a_run_with_rewards_says_where_its_seconds_go(rl, algorithm, data_dir):
    data = ImageCaptionsConfig(path=str(data_dir), height=16, width=16)
    is_ddrl = isinstance(algorithm, DdrlConfig)
    recipe = replace(rl, algorithm=algorithm, data=data if is_ddrl else None)
    for report, figures in taken(train_rl, recipe):
        assert figures.keys() >= PARTS
        assert 0.9 * figures["step_s"] < sum(figures[p] for p in PARTS) <= figures["step_s"]
        assert figures["train_s"] == pytest.approx(report.seconds)
        assert figures["samples_per_s"] == pytest.approx(4 / figures["step_s"])
        assert figures["trained_per_s_per_rank"] == pytest.approx(4 / figures["train_s"])
        assert figures["generated_per_s_per_rank"] == pytest.approx(4 / figures["sample_s"])
        assert figures["peak_memory_mib"] > 50
        assert figures["tflops_per_s_per_rank"] > 0
        assert "mfu" not in figures, "no peak is known of a CPU"


def test_tokens_are_those_of_trained_passes(rl):
    levels = 2  # 0.99 of three steps, rounded down
    for _, figures in taken(train_rl, replace(rl, algorithm=NftConfig())):
        tokens = figures["tokens_per_s_per_rank"] * figures["train_s"]
        assert tokens == pytest.approx(4 * levels * 4 * 4)  # 8 x 8 latents, patches of 2 x 2


def test_a_supervised_run_says_how_long_its_data_took(model_dirs, data_dir, tmp_path):
    recipe = DiffusionSftConfig(
        model=str(model_dirs("sd3")),
        data=ImageCaptionsConfig(path=str(data_dir), height=16, width=16),
        output=str(tmp_path / "out"),
        num_steps=2,
        batch_size=3,
    )
    for _, figures in taken(train_sft, recipe):
        assert figures.keys() >= {"data_s", "train_s"}
        assert figures["data_s"] + figures["train_s"] <= figures["step_s"]
        assert figures["samples_per_s"] == pytest.approx(3 / figures["step_s"])
        tokens = figures["tokens_per_s_per_rank"] * figures["train_s"]
        assert tokens == pytest.approx(3 * 4 * 4)


def test_peak_memory_stays_when_what_was_held_is_given_back():
    cpu = torch.device("cpu")
    before = peak_memory_mib(cpu)
    held = torch.ones(int((before + 64) * 2**18))  # four bytes each
    peak = peak_memory_mib(cpu)
    del held
    assert peak >= before + 64
    assert peak_memory_mib(cpu) >= peak - 1, "as the system rounds"
