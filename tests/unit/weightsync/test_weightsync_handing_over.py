"""What a user hands over by mistake is refused with a word on what is due."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_weightsync import (
    ConfigurationError,
    FileReceiver,
    FileSender,
    FileSenderConfig,
    LayoutError,
    ReceiverConfig,
    SenderConfig,
    WeightReceiver,
    WeightSender,
    shards_of,
)

_NOWHERE = "127.0.0.1:9"


@pytest.mark.parametrize(
    "mistake",
    [
        lambda model: model,
        lambda model: model.named_parameters(),
        lambda model: model.state_dict(),
        lambda model: [model],
    ],
    ids=["module", "pairs", "state_dict", "modules"],
)
@pytest.mark.parametrize(
    "end",
    [
        lambda given, _: WeightSender(given),
        lambda given, _: WeightReceiver([_NOWHERE], wanted=given),
        lambda given, where: FileSender(given, where),
        lambda given, where: FileReceiver(where, wanted=given),
    ],
    ids=["sender", "receiver", "file_sender", "file_receiver"],
)
def test_what_are_no_shards_is_refused_by_name(
    mistake: Callable[[nn.Module], Any], end: Callable[[Any, str], object], tmp_path
):
    given = mistake(nn.Linear(3, 2))
    with pytest.raises(LayoutError, match=r"hand over shards_of\(...\)"):
        end(given, str(tmp_path))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: model.parameters(), "named_parameters.*not tensors without names"),
        (lambda model: model.weight, "named_parameters.*not tensors without names"),
        (lambda _: "weight", "named_parameters.*not str"),
        (lambda _: None, "named_parameters.*not NoneType"),
        (lambda model: {**model.state_dict(), "_extra_state": b""}, "_extra_state: .* not bytes"),
        (lambda model: {0: model.weight}, "a name is 0"),
        (lambda _: nn.LazyLinear(2), "weight: has no shape yet"),
        (lambda _: [("w", torch.ones(2, 2).to_sparse())], "w: .* it is torch.sparse_coo"),
        (
            lambda _: [("w", torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged))],
            "w: .* it is nested",
        ),
    ],
)
def test_what_are_no_named_tensors_is_refused_with_what_is_due(given, message):
    with pytest.raises(LayoutError, match=message):
        shards_of(given(nn.Linear(3, 2)))


def test_a_tensor_whose_elements_share_memory_is_sent_and_never_received_into(tmp_path):
    """It was found out by the commit, which had put other tensors to use by then."""
    expanded = shards_of([("w", torch.ones(1).expand(4))])
    with WeightSender(expanded) as sender, WeightReceiver([sender.endpoint]) as receiver:
        sender.publish(1)
        receiver.stage(1)
        assert receiver.staged_shards()[0].tensor.tolist() == [1.0] * 4
    for make in (
        lambda: WeightReceiver([_NOWHERE], wanted=expanded),
        lambda: FileReceiver(tmp_path, wanted=expanded),
    ):
        with pytest.raises(LayoutError, match="w: several of its elements are one in memory"):
            make()


def test_a_wire_dtype_leaves_what_are_no_numbers_by_themselves(tmp_path):
    """The scales of MXFP8, say; receivers of scales refused the numbers that were made of them."""
    scales = torch.tensor([120, 127], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    packed = torch.tensor([0x21, 0x43], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    given = {"scales": scales, "packed": packed, "weight": torch.ones(2)}
    taken = {
        name: torch.zeros(2, dtype=torch.uint8).view(t.dtype)
        for name, t in given.items()
        if name != "weight"
    }
    with WeightSender(shards_of(given), config=SenderConfig(wire_dtype="bfloat16")) as sender:
        sender.publish(1)
        assert {s.name: s.dtype for s in sender.layout.full_specs()} == {
            "scales": "float8_e8m0fnu",
            "packed": "float4_e2m1fn_x2",
            "weight": "bfloat16",
        }
        with WeightReceiver([sender.endpoint], wanted=shards_of(taken)) as receiver:
            receiver.stage(1)
            receiver.commit()
    for name, tensor in taken.items():
        assert torch.equal(tensor.view(torch.uint8), given[name].view(torch.uint8))
    FileSender(shards_of(given), tmp_path, config=FileSenderConfig(wire_dtype="bfloat16")).publish(
        1
    )
    receiver = FileReceiver(tmp_path)
    receiver.stage()
    assert {s.spec.dtype for s in receiver.staged_shards()} == {
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "bfloat16",
    }


def test_a_model_without_memory_is_refused_at_both_ends():
    """Versions would be committed into nothing, without a word."""
    shards = shards_of(nn.Linear(3, 2, device="meta"))
    with pytest.raises(LayoutError, match="weight: its tensor is on the meta device"):
        WeightReceiver([_NOWHERE], wanted=shards)
    with pytest.raises(LayoutError, match="weight: its tensor is on the meta device"):
        WeightSender(shards)


def test_a_state_dict_gives_parameters_and_buffers():
    shards = shards_of(nn.BatchNorm1d(4).state_dict())
    assert [shard.spec.name for shard in shards] == [
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_others_are_never_told_an_address_that_is_their_own(host):
    with pytest.raises(ConfigurationError, match="by which they reach this host"):
        SenderConfig(bind_host=host, token="t")
    if host:  # Nobody is served without one.
        with pytest.raises(ConfigurationError, match="by which they reach this host"):
            ReceiverConfig(serve_host=host, token="t")


def test_one_endpoint_is_not_taken_for_a_list_of_letters():
    with pytest.raises(ConfigurationError, match=r"endpoints are a list: \['127.0.0.1:9'\]"):
        WeightReceiver(_NOWHERE)


def test_an_endpoint_that_is_given_twice_is_called_so():
    with WeightSender(shards_of([("w", torch.ones(2))])) as sender:
        receiver = WeightReceiver([sender.endpoint] * 2)
        with pytest.raises(ConfigurationError, match="one was given twice"):
            receiver.stage(timeout_s=30)
        receiver.close()


def test_senders_that_were_not_told_their_ranks_are_told_so():
    """Each process of a trainer makes one, and all are rank 0 of 1 if nobody says otherwise."""
    with ExitStack() as stack:
        senders = [
            stack.enter_context(WeightSender(shards_of([(name, torch.ones(2))]))) for name in "ab"
        ]
        receiver = WeightReceiver([sender.endpoint for sender in senders])
        with pytest.raises(ConfigurationError, match=r"several are of one rank.*rank=\.\.\."):
            receiver.stage(timeout_s=30)
        receiver.close()
