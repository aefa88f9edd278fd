"""The interface of an address, and which one gloo is told to use."""

import os

import pytest
from with_ipv6 import WITH_IPV6

from cosmos_app.interfaces import interface_of, on_loopback
from cosmos_app.roles.process import stay_on_loopback


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"


@WITH_IPV6
@pytest.mark.parametrize("address", ["::1", "0:0:0:0:0:0:0:1", "::1%lo"])
def test_the_interface_of_an_address_of_ipv6_is_found(address: str) -> None:
    assert interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "not:an:address", "a-name"])
def test_an_address_of_nobody_here_has_no_interface(address: str) -> None:
    assert interface_of(address) == ""


def test_gloo_uses_loopback_where_nothing_was_told() -> None:
    assert on_loopback({"PATH": "/bin"}) == {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("told", [{"COSMOS_HOST": "10.0.0.1"}, {"GLOO_SOCKET_IFNAME": "eth0"}])
def test_an_address_or_interface_that_was_told_is_left(told: dict[str, str]) -> None:
    assert on_loopback(told) == {}


@pytest.mark.parametrize(
    ("told", "interface"),
    [
        ({}, "lo"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"WORLD_SIZE": "2"}, None),
        ({"COSMOS_HOST": "10.0.0.1"}, None),
    ],
)
def test_a_run_of_one_replica_stays_on_loopback_if_its_ranks_are_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], interface: str | None
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "COSMOS_HOST", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    stay_on_loopback()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
