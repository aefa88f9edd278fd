"""Hand-written weight loaders, recorded and replayed against what they really do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cosmos_weightsync import Box
from cosmos_weightsync.integrations.regions import Strided, boxes_of_view, merge_overlapping
from cosmos_weightsync.integrations.tracing import Constant, Copy, LoadTrace

Loader = Callable[[Tensor, Tensor], None]


def boxes(view: Tensor, whole: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes that a view of a tensor reads."""
    strided = Strided(tuple(view.shape), view.stride(), view.storage_offset())
    flat = Strided(strided.shape, strided.strides)
    found = boxes_of_view(strided, whole.shape, flat)
    return sorted((region.box.start, region.box.stop) for region in found)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda x: x, [((0, 0), (6, 4))]),
        (lambda x: x[2:4], [((2, 0), (4, 4))]),
        (lambda x: x[1:5, 1:3], [((1, 1), (5, 3))]),
        (lambda x: x.t()[1:3], [((0, 1), (6, 3))]),
        (lambda x: x[3], [((3, 0), (4, 4))]),
        (lambda x: x[3:4, 2], [((3, 2), (4, 3))]),
        (lambda x: x.view(3, 2, 4)[:, 0], [((i, 0), (i + 1, 4)) for i in (0, 2, 4)]),
        (lambda x: x.view(2, 3, 4)[:, 1:], [((1, 0), (3, 4)), ((4, 0), (6, 4))]),
        (lambda x: x.view(-1)[8:16], [((2, 0), (4, 4))]),
        (lambda x: x.view(24), [((0, 0), (6, 4))]),
        (lambda x: x.view(3, 2, 2, 2).permute(2, 0, 1, 3)[1], [((0, 2), (6, 4))]),
        (lambda x: x[:0], []),
        # Cut across rows: no box, so the rows that it touches.
        (lambda x: x.view(-1)[3:9], [((0, 0), (3, 4))]),
    ],
)
def test_boxes_of_a_view(view, expected):
    whole = torch.empty(6, 4)
    assert boxes(view(whole), whole) == expected


def test_a_view_of_many_stripes_is_one_box_with_holes():
    whole = torch.empty(4, 1000)
    assert boxes(whole[:, ::2], whole) == [((0, 0), (4, 999))]


def test_a_scalar_is_one_box():
    whole = torch.empty(())
    assert boxes(whole, whole) == [((), ())]


def test_overlapping_boxes_become_one():
    low, high, apart = Box((0, 0), (3, 4)), Box((2, 1), (5, 4)), Box((5, 0), (6, 4))
    assert merge_overlapping([low, high, apart]) == [Box((0, 0), (5, 4)), apart]


def load_qkv(parameter: Tensor, given: Tensor) -> None:
    """Keeps the second half of the heads; heads of width 2, q of all heads before k before v."""
    heads = given.view(3, 4, 2, 4)
    for index, part in enumerate(heads.chunk(3)):
        parameter.data.narrow(0, 4 * index, 4).copy_(part[0, 2:].reshape(4, 4))


def load_interleaved(parameter: Tensor, given: Tensor) -> None:
    """The checkpoint has q, k and v of a head next to each other."""
    for index in range(3):
        rows = given.view(4, 3, 2, 4)[:2, index]
        parameter.data[4 * index : 4 * index + 4].view(2, 2, 4)[:] = rows


def load_transposed(parameter: Tensor, given: Tensor) -> None:
    shard = torch.transpose(given, 0, 1).narrow(0, 1, 2)
    parameter.data.view(2, 24).copy_(shard.contiguous().to(torch.float64).squeeze().unsqueeze(0)[0])


def load_broadcast(parameter: Tensor, given: Tensor) -> None:
    parameter.data[:12].copy_(given[5:6, :].select(0, 0))
    parameter.data[12:].zero_()


def load_split(parameter: Tensor, given: Tensor) -> None:
    first, second = given.split([8, 16])
    for row, part in enumerate(second.unbind()):
        if row < 4:
            parameter.data[row].copy_(part)
    torch.Tensor.copy_(parameter.data[4:12], first)


@pytest.mark.parametrize(
    "load", [load_qkv, load_interleaved, load_transposed, load_broadcast, load_split]
)
def test_what_was_recorded_does_what_the_loader_does(load: Loader):
    """Replayed from the boxes alone, cut out of the tensor as a receiver gets them."""
    given = torch.arange(96.0).reshape(24, 4)
    expected = torch.nn.Parameter(torch.full((12, 4), -1.0))
    load(expected, given)

    parameter = torch.nn.Parameter(torch.empty(12, 4, device="meta"))
    trace = LoadTrace()
    trace.watch("parameter", parameter)
    with trace, torch.no_grad():
        load(parameter, trace.tensor("given", given.shape, given.dtype))
    assert not trace.opaque

    found = torch.full((12, 4), -1.0)
    for copy in trace.copies:
        assert copy.key == "parameter"
        replay(copy, given, found)
    assert torch.equal(found, expected)


def replay(copy: Copy | Constant, given: Tensor, found: Tensor) -> None:
    if isinstance(copy, Constant):
        target = copy.target
        found.as_strided(target.shape, target.strides, target.offset).fill_(copy.value)
        return
    for region in boxes_of_view(copy.source, given.shape, copy.target):
        received = given[region.box.relative_to(Box.full(given.shape))].clone().reshape(-1)
        local = region.local(given.shape)
        values = received.as_strided(local.shape, local.strides, local.offset)
        for cast in copy.casts:
            values = cast(values)
        target = region.target
        found.as_strided(target.shape, target.strides, target.offset).copy_(values)


def test_casts_are_kept_in_order():
    trace = LoadTrace()
    parameter = torch.empty(4, device="meta")
    trace.watch("parameter", parameter)
    with trace:
        given = trace.tensor("given", (4,), torch.float32)
        parameter.copy_(given.half().float().bfloat16())
    (copy,) = trace.copies
    assert isinstance(copy, Copy)
    assert [cast.dtype for cast in copy.casts] == [torch.float16, torch.float32, torch.bfloat16]


def test_a_traced_tensor_answers_what_needs_no_value():
    given = LoadTrace().tensor("given", (6, 4), torch.bfloat16)
    assert (given.shape, given.dtype, given.device.type) == ((6, 4), torch.bfloat16, "cpu")
    assert (len(given), given.dim(), given.numel(), given.is_meta) == (6, 2, 24, False)
    assert not given.t().is_contiguous()
    assert given.chunk(3)[1].size(0) == 2


def double(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data.copy_(given * 2)


def stack(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data.copy_(torch.cat([given, other]))


def detour(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    buffer = torch.empty(24, 4)
    buffer[:12] = given
    parameter.data.copy_(buffer.abs())


def choose(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    if given.sum().item() >= 0:
        parameter.data[:12].copy_(given)


def select_by_value(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[torch.tensor([0, 3])] = given[:2]


def transform(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[:12].copy_(given)
    parameter.data.copy_(torch.exp(parameter.data))


def read_first(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[0] = given[0, 0].item()


def read_all(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[:12].copy_(torch.tensor(given.tolist()))


def leave_torch(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[:12].copy_(torch.from_numpy(given.numpy() + 1))


def mask(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[:6].copy_(given[torch.arange(12) % 2 == 0])


def write_bits(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[:12].view(torch.int32).copy_(given.view(torch.int32))


def write_rows(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data.index_copy_(0, torch.arange(12), given)


def write_out(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    torch.mul(given, 2, out=parameter.data[:12])


def write_several(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    torch._foreach_copy_([parameter.data[:12]], [given])


def replace_data(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data = torch.cat([given, given])


def add_in_place(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[:12].copy_(given)
    parameter.data.add_(1)


def add_to_a_part(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[:12].copy_(given)
    parameter.data[3:5] += 1


def add_in_a_buffer(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    buffer = torch.zeros(12, 4)
    buffer.add_(given)
    parameter.data[:12].copy_(buffer)


def copy_what_is_there(parameter: Tensor, given: Tensor, other: Tensor) -> None:
    parameter.data[12:].copy_(parameter.data[:12])


@pytest.mark.parametrize(
    ("load", "names"),
    [
        (double, {"given"}),
        (stack, {"given", "other"}),
        (detour, {"given"}),
        (choose, {"given"}),
        (select_by_value, {"given"}),
        (transform, {"given"}),
        (read_first, {"given"}),
        (read_all, {"given"}),
        (leave_torch, {"given"}),
        (mask, {"given"}),
        (write_bits, {"given"}),
        (write_rows, {"given"}),
        (write_out, {"given"}),
        (write_several, {"given"}),
        (replace_data, {"given"}),
        (add_in_place, {"given"}),
        (add_to_a_part, {"given"}),
        (add_in_a_buffer, {"given"}),
        (copy_what_is_there, {"given"}),
    ],
)
def test_what_cannot_be_recorded_is_named_with_the_reason(load, names):
    trace = LoadTrace()
    parameter = torch.nn.Parameter(torch.empty(24, 4, device="meta"), requires_grad=False)
    trace.watch("parameter", parameter)
    with trace, torch.no_grad():
        other = trace.tensor("other", (12, 4), torch.float32)
        load(parameter, trace.tensor("given", (12, 4), torch.float32), other)
    assert set(trace.opaque) == names
    assert all(trace.opaque.values())
    assert not [c for c in trace.copies if isinstance(c, Copy) and c.name not in trace.opaque]
    assert set(trace.opaque_targets) == {"parameter"}


@pytest.mark.parametrize(
    ("load", "value"),
    [
        (lambda target: target.zero_(), 0.0),
        (lambda target: target.fill_(3), 3.0),
        (lambda target: target.fill_(value=3), 3.0),
        (lambda target: target.copy_(torch.tensor(3.0), True), 3.0),
        (lambda target: target.copy_(other=torch.tensor(3.0)), 3.0),
        (lambda target: target.__setitem__((slice(None),), 3), 3.0),
    ],
)
def test_what_the_loader_writes_by_itself_is_a_constant(load, value):
    trace = LoadTrace()
    parameter = torch.nn.Parameter(torch.empty(24, 4, device="meta"), requires_grad=False)
    trace.watch("parameter", parameter)
    with trace, torch.no_grad():
        load(parameter.data[3:])
        parameter.data.requires_grad_(False).t_()  # Changes no value.
    (constant,) = trace.copies
    assert isinstance(constant, Constant)
    assert float(constant.value) == value
    assert constant.target == Strided((21, 4), (4, 1), 12)
    assert not trace.opaque


def test_only_the_tensor_that_was_lost_is_opaque():
    trace = LoadTrace()
    parameter = torch.nn.Parameter(torch.empty(24, 4, device="meta"))
    trace.watch("parameter", parameter)
    with trace, torch.no_grad():
        parameter.data[:12].copy_(trace.tensor("kept", (12, 4), torch.float32))
        parameter.data[12:].copy_(-trace.tensor("lost", (12, 4), torch.float32))
    assert set(trace.opaque) == {"lost"}
    assert [copy.name for copy in trace.copies if isinstance(copy, Copy)] == ["kept"]
