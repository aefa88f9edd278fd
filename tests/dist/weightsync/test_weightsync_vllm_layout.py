"""Discovery on hand-written models: what is refused, and what a refusal leaves behind."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from cosmos_weightsync import Box, Layout, ShardSpec, UnknownTensorError

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from cosmos_weightsync.integrations.vllm_engine import load_version
from cosmos_weightsync.integrations.vllm_layout import discover_layout

pytestmark = pytest.mark.slow  # Importing vLLM is.

NAMES = {"up": (4, 3), "gate": (4, 3), "norm": (3,)}


class Model(nn.Module):
    """Fuses two projections, the second of them transposed in the checkpoint's other half."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(3, 8, bias=False)
        self.norm = nn.LayerNorm(3, bias=False)
        self.register_buffer("cache", torch.arange(5.0), persistent=False)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        places = {
            "up": self.fused.weight.data[:4],
            "gate": self.fused.weight.data[4:],
            "norm": self.norm.weight.data,
        }
        for name, tensor in weights:
            places[name].copy_(tensor)


class Deriving(Model):
    """Keeps something computed from the weights, as a few of vLLM's models do."""

    doubled: Tensor

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.doubled = 2 * self.norm.weight.data


class Renewing(Model):
    """Makes a parameter anew before it fills it, as vLLM's Transformers backend does."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.norm.weight = nn.Parameter(torch.empty(3), requires_grad=False)
        super().load_weights(weights)


class Shifting(Model):
    """Adds to a parameter once it is filled, as for norms that are stored less one."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.norm.weight.data.add_(1)


class Reading(Model):
    """Takes a value out of one tensor, and puts it into the parameter of another."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name == "norm":
                self.fused.weight.data[7, 2] = tensor[1].item()


class Scattering(Model):
    """Writes rows by their numbers into what it has emptied, and a norm by its bits."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                bits = self.norm.weight.data.view(torch.int32)
                bits.copy_(tensor.view(torch.int32))
                continue
            half = self.fused.weight.data[4 * (name == "gate") :][:4]
            half.zero_()
            half.index_copy_(0, torch.tensor([3, 0, 2, 1]), tensor)


class Counting(Model):
    """One projection goes through arithmetic."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((n, t + 1 if n == "gate" else t) for n, t in weights)


def offered(**changes: tuple[int, ...] | None) -> Layout:
    shapes = {**NAMES, **changes}
    specs = [
        ShardSpec(name, shape, Box.full(shape), "float32")
        for name, shape in shapes.items()
        if shape is not None
    ]
    return Layout.from_ranks([specs])


def new_tensors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in NAMES.items()}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (offered(stranger=(2,)), "stranger"),
        (offered(up=(5, 3)), "up"),
        (offered(gate=None), r"fused\.weight \(12 of 24 elements\)"),
        (offered(norm=None), r"norm\.weight \(0 of 3 elements\)"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(layout, words):
    model = Model()
    before = {
        name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()
    }
    with pytest.raises(UnknownTensorError, match=words):
        discover_layout(model, layout)
    after = model.state_dict(keep_vars=True)
    for name, (value, copy) in before.items():
        assert after[name] is value
        assert torch.equal(value, copy)
    assert torch.equal(model.cache, torch.arange(5.0))


WHOLE = {
    Model: set[str](),
    Renewing: set[str](),
    Counting: {"gate"},
    Deriving: set(NAMES),
    Shifting: {"norm"},
    Reading: set(NAMES),  # The value goes beside what came of the others.
    Scattering: set(NAMES),
}
"""What is left to the loader of each kind."""


@pytest.mark.parametrize("kind", WHOLE)
def test_a_version_is_what_the_loader_would_have_made_of_it(kind):
    tensors, expected, model = new_tensors(), kind(), kind()
    expected.load_weights(tensors.items())
    if kind is Deriving:
        model.doubled = torch.zeros(3)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    layout = discover_layout(model, offered())
    assert set(layout.whole) == WHOLE[kind]
    if kind is Deriving:
        assert torch.equal(model.doubled, torch.zeros(3))  # Discovery left it alone.

    config = VllmConfig()
    received = {(spec.name, spec.box): tensors[spec.name] for spec in layout.specs}
    with set_current_vllm_config(config):
        load_version(model, config.model_config, layout, received)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert torch.equal(model.cache, torch.arange(5.0))
    if kind is Deriving:
        assert torch.equal(model.doubled, expected.doubled)


def test_trained_modules_alone_may_be_sent():
    model, tensors = Model(), new_tensors()
    kept = model.fused.weight.detach().clone()
    layout = discover_layout(model, offered(up=None, gate=None), missing="keep")
    config = VllmConfig()
    with set_current_vllm_config(config):
        load_version(
            model, config.model_config, layout, {("norm", Box.full((3,))): tensors["norm"]}
        )
    assert torch.equal(model.norm.weight, tensors["norm"])
    assert torch.equal(model.fused.weight, kept)
    with pytest.raises(UnknownTensorError, match=r"fused\.weight"):
        discover_layout(model, offered(gate=None), missing="keep")  # Half of a module.
