"""8-bit products against rounding done by hand, and training with them against training without."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    LowPrecisionConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionError,
    build_mesh,
    load_causal_lm,
    use_low_precision,
)

pytest.importorskip("torchao")
CPU = torch.device("cpu")
LARGEST = 448.0  # of float8 e4m3


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict = field(default_factory=dict)


def rounded(values: torch.Tensor, recipe: str) -> torch.Tensor:
    """Round [N, K] as the recipe does: a scale for all, for each row, or for 32 in a row."""
    if recipe == "tensorwise":
        groups = values.reshape(1, -1)
    elif recipe == "mxfp8":
        groups = values.reshape(-1, 32)
    else:
        groups = values
    scales = LARGEST / groups.double().abs().amax(dim=1, keepdim=True)
    if recipe != "tensorwise":
        scales = torch.exp2(torch.floor(torch.log2(scales)))
    scaled = (groups.double() * scales).clamp(-LARGEST, LARGEST)
    return (scaled.float().to(torch.float8_e4m3fn).double() / scales).reshape(values.shape).float()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"])
def test_a_layer_multiplies_what_rounding_by_hand_gives(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    inputs = torch.randn(16, 64) * torch.logspace(-2, 2, 16)[:, None]
    config = LowPrecisionConfig(recipe=recipe, emulate=True)
    assert use_low_precision(model, config, CPU) == ["0"]
    expected = rounded(inputs, recipe) @ rounded(model[0].weight.detach(), recipe).T
    expected = expected + model[0].bias
    found = model(inputs)
    tolerance = 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    plain = nn.functional.linear(inputs, model[0].weight, model[0].bias)
    assert (found - plain).abs().max() > tolerance  # it did round


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_a_model_learns_in_emulated_8_bits_as_it_does_without(model_directory, recipe):
    mesh = build_mesh(ParallelConfig())
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: torch.Tensor) -> Sums:
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="sum")
        return Sums(losses, torch.tensor(float(batch[:, 1:].numel())))

    curves = []
    eight_bits = LowPrecisionConfig(recipe=recipe, emulate=True)
    for config in (ModelConfig(), ModelConfig(low_precision=eight_bits)):
        model = load_causal_lm(model_directory("Qwen3"), mesh, config)
        names = {name for name, _ in model.named_parameters()}
        learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=1e-2)), mesh=mesh)
        curves.append(([learner.step([ids], loss).loss for _ in range(12)], names))
    (plain, plain_names), (low, low_names) = curves
    assert plain_names == low_names
    assert low[-1] < 0.8 * low[0]
    assert all(abs(a / b - 1) < 0.05 for a, b in zip(low, plain, strict=True))
    assert low != plain


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("rowwise", r"rowwise needs a GPU of compute capability 8\.9"), ("mxfp8", r"10\.0")],
)
def test_a_device_without_8_bit_products_is_refused(recipe, message):
    with pytest.raises(PrecisionError, match=message):
        use_low_precision(nn.Sequential(nn.Linear(64, 32)), LowPrecisionConfig(recipe=recipe), CPU)


def test_a_recipe_of_scales_that_there_is_not_is_refused():
    with pytest.raises(PrecisionError, match="recipe is 'fp8'; it must be one of 'tensorwise'"):
        LowPrecisionConfig(recipe="fp8")  # type: ignore[arg-type]


def test_a_model_in_which_no_layer_would_change_is_refused():
    with pytest.raises(PrecisionError, match="multiples of 16"):
        use_low_precision(nn.Sequential(nn.Linear(8, 8)), LowPrecisionConfig(emulate=True), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_loss_curve_in_8_bits_follows_that_in_bfloat16(recipe):
    """Within 5 % of what bfloat16 has, a step sooner or later: it falls by 16 % in a step."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    device = torch.device("cuda")
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=64
    )
    ids = torch.randint(0, 512, (8, 128), generator=torch.Generator().manual_seed(0)).to(device)
    curves = []
    for low in (False, True):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(device, torch.bfloat16)
        if low:
            use_low_precision(model, LowPrecisionConfig(recipe=recipe), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(50):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    plain, eight = curves
    assert not math.isnan(eight[-1])
    for step, loss in enumerate(eight):
        near = plain[max(0, step - 1) : step + 2]
        assert 0.95 * min(near) < loss < 1.05 * max(near), (step, loss, near)
