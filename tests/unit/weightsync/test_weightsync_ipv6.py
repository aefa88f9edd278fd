"""Hosts that are reached by IPv6 alone."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from with_ipv6 import WITH_IPV6

from cosmos_weightsync import (
    ReceiverConfig,
    SenderConfig,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.files.pulling import PushedDirectory, pull_directory
from cosmos_weightsync.files.pushing import DirectoryServer
from cosmos_weightsync.frames import join_endpoint, parse_endpoint

pytestmark = WITH_IPV6


@pytest.mark.parametrize("transport", ["auto", "tcp", "process_group"])
def test_weights_arrive(transport):
    given, taken = torch.arange(1000.0), torch.zeros(1000)
    with WeightSender(shards_of([("w", given)]), config=SenderConfig(bind_host="::1")) as sender:
        assert sender.endpoint.startswith("[::1]:")
        sender.publish(1)
        config = ReceiverConfig(transport=transport)
        wanted = shards_of([("w", taken)])
        with WeightReceiver([sender.endpoint], wanted=wanted, config=config) as receiver:
            receiver.stage(1, timeout_s=30)
            receiver.commit()
    assert torch.equal(given, taken)


def test_members_find_each_other_by_a_directory_and_pass_on():
    given, taken = torch.arange(1000.0), [torch.zeros(1000), torch.zeros(1000)]
    with WeightDirectory(bind_host="::1") as directory, ExitStack() as stack:
        sending = SenderConfig(bind_host="::1", directory=directory.endpoint)
        sender = WeightSender(shards_of([("w", given)]), config=sending)
        sender.publish(1)
        config = ReceiverConfig(directory=directory.endpoint, serve_host="::1", transport="tcp")
        for tensor in taken:  # The second can have it from the first alone.
            wanted = shards_of([("w", tensor)])
            receiver = stack.enter_context(WeightReceiver(wanted=wanted, config=config))
            receiver.stage(1, timeout_s=30)
            receiver.commit()
            sender.close()
    assert all(torch.equal(given, tensor) for tensor in taken)


def test_a_directory_of_files_is_pushed(tmp_path: Path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "file").write_text("content")
    server = DirectoryServer(tmp_path / "from", host="::1", token="t")
    with closing(server), closing(PushedDirectory(server.endpoint, token="t")) as source:
        pull_directory(source, tmp_path / "to", lambda _: None)
    assert (tmp_path / "to" / "file").read_text() == "content"


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "node-7"])
def test_endpoints_are_put_together_as_they_are_taken_apart(host):
    assert parse_endpoint(join_endpoint(host, 4321)) == (host, 4321)
