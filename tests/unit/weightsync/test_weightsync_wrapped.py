"""Wrappers of models leave no trace in names; tensors that are not the model's own are refused."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from cosmos_weightsync import LayoutError, WeightReceiver, WeightSender, shards_of
from cosmos_weightsync.encodings import trainable


class Model(nn.Module):
    """Has a part that is called as wrappers call what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.module = nn.Linear(2, 2)


NAMES = ["head.weight", "head.bias", "module.weight", "module.bias"]


@pytest.fixture
def rank_of_two() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def names(model: nn.Module) -> list[str]:
    return [shard.spec.name for shard in shards_of(model)]


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        lambda model: torch.compile(DistributedDataParallel(model)),
        lambda model: DistributedDataParallel(torch.compile(model)),
        nn.DataParallel,
        AveragedModel,
    ],
)
@pytest.mark.usefixtures("rank_of_two")
def test_names_are_those_of_the_model_inside(wrap):
    assert names(wrap(Model())) == NAMES


@pytest.mark.usefixtures("rank_of_two")
def test_a_part_of_a_model_may_be_wrapped():
    model = nn.ModuleDict({"a": DistributedDataParallel(Model()), "module": Model()})
    assert names(model) == [*(f"a.{n}" for n in NAMES), *(f"module.{n}" for n in NAMES)]


@pytest.mark.parametrize("source", [lambda model: model, trainable])
@pytest.mark.usefixtures("rank_of_two")
def test_what_fsdp2_has_gathered_is_described_as_this_rank_keeps_it(source):
    """After an evaluation the root's parameters are whole, in memory that training frees."""
    model = nn.Sequential(nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    boxes = [str(shard.spec.box) for shard in shards_of(model)]
    assert boxes == ["[0:1, 0:4]", "[0:1]"]
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert type(model[0].weight) is nn.Parameter  # The whole.
    found = shards_of(source(model))
    assert [str(shard.spec.box) for shard in found] == boxes
    with WeightSender(found) as sender:
        model(torch.ones(1, 4)).sum().backward()
        sender.publish(1)  # Was refused: the model seemed to have moved.


def _sharded(model: nn.Sequential) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def _split(model: nn.Sequential) -> None:
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})


def _replaced(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 2)


def _resized(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(3, 4))


@pytest.mark.parametrize("change", [_sharded, _split, _replaced, _resized])
@pytest.mark.usefixtures("rank_of_two")
def test_a_model_whose_parameters_others_have_replaced_is_noticed(change):
    """As `accelerator.prepare` does: what nobody trained any more was published for ever."""
    model = nn.Sequential(nn.Linear(4, 2))
    with WeightSender(shards_of(model)) as sender:
        change(model)
        with pytest.raises(LayoutError, match=r"0.weight: .*'accelerator.prepare'.*make another"):
            sender.publish(1)


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: register_parametrization(model[0], "weight", Half()),
        DistributedDataParallel,
        lambda model: torch.compile(model),
    ],
)
@pytest.mark.usefixtures("rank_of_two")
def test_wrapping_a_model_that_was_described_changes_nothing(change):
    model = nn.Sequential(nn.Linear(4, 2))
    with WeightSender(shards_of(model)) as sender:
        kept = change(model)
        sender.publish(1)
        del kept


@pytest.mark.parametrize("with_own_parameters", [False, True])
@pytest.mark.usefixtures("rank_of_two")
def test_what_fsdp1_has_sharded_is_refused(with_own_parameters):
    """A flat part of one rank was taken for the whole of a tensor."""
    model = FullyShardedDataParallel(
        nn.Sequential(Model()),
        device_id=torch.device("cpu"),
        use_orig_params=with_own_parameters,
    )
    with pytest.raises(LayoutError, match=r"FSDP1.*fully_shard"):
        shards_of(model)
    if not with_own_parameters:
        with pytest.raises(LayoutError, match=r"_flat_param: .*FSDP1"):
            shards_of(model.named_parameters())


def test_what_deepspeed_has_partitioned_is_refused():
    """It leaves parameters without elements, and theirs in an attribute."""
    weight = nn.Parameter(torch.empty(0))
    weight.ds_tensor = torch.ones(4)
    with pytest.raises(LayoutError, match="w: DeepSpeed has partitioned it"):
        shards_of([("w", weight)])


class Scaled(torch.Tensor):
    """Integers and a scale, as quantised weights are; nothing else can be done with it."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self):
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Scaled(parts["whole"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def test_a_quantised_tensor_is_refused_with_the_names_of_its_parts():
    """It failed in the middle of a commit, which left half of the model in each version."""
    weight = Scaled(torch.ones(2, 3, dtype=torch.int8), torch.ones(()))
    with pytest.raises(LayoutError, match=r"w: a Scaled is made of others \(whole, scale\)"):
        shards_of([("w", weight)])
    parts = {f"w.{name}": getattr(weight, name) for name in ("whole", "scale")}
    assert [shard.spec.dtype for shard in shards_of(parts)] == ["int8", "float32"]


class Noted(Scaled):
    """The numbers themselves and something beside them, as the weights of float8 training are."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Noted, lambda noted: noted.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_a_tensor_that_adds_something_to_its_numbers_is_one_like_any_other():
    weight, taken = Noted(torch.arange(6.0), torch.ones(())), torch.zeros(6)
    with (
        WeightSender(shards_of({"w": weight})) as sender,
        WeightReceiver([sender.endpoint], wanted=shards_of({"w": taken})) as receiver,
    ):
        sender.publish(1)
        receiver.stage(1)
        receiver.commit()
    assert taken.tolist() == [0, 1, 2, 3, 4, 5]
