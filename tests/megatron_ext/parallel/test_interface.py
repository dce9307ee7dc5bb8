"""Where a node is reached: the interface that the ranks' messages use, else the address of its name."""

from __future__ import annotations

import socket

import pytest

from megatron_ext.contract.errors import EngineError
from megatron_ext.parallel import interface


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in interface.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def name_stands_for(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def answer(host: str, port: object, **_: object) -> list[tuple]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.mark.parametrize("variable", interface.VARIABLES)
@pytest.mark.parametrize("value", ["lo", "=lo", "nothing0,lo", "l"])
def test_the_interface_of_the_messages_decides(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    name_stands_for(monkeypatch, "10.1.2.3")
    monkeypatch.setenv(variable, value)
    assert interface.own_address() == "127.0.0.1"


def test_what_nccl_leaves_out_names_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    name_stands_for(monkeypatch, "10.1.2.3")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker,lo")
    assert interface.own_address() == "10.1.2.3"


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with pytest.raises(EngineError, match=r"GLOO_SOCKET_IFNAME=ib7: .* has no such interface .*it has .*\blo\b"):
        interface.own_address()


@pytest.mark.parametrize(
    ("addresses", "found"),
    [(["10.1.2.3"], "10.1.2.3"), (["127.0.1.1", "10.1.2.3"], "10.1.2.3"), (["::1", "fd00::7"], "fd00::7")],
    ids=["one", "debian", "ipv6"],
)
def test_a_name_stands_for_what_others_reach(monkeypatch: pytest.MonkeyPatch, addresses: list[str], found: str) -> None:
    name_stands_for(monkeypatch, *addresses)
    assert interface.own_address() == found


def test_a_name_that_leads_home_leaves_it_to_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    name_stands_for(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(interface, "_of_the_default_route", lambda: "10.9.9.9")
    assert interface.own_address() == "10.9.9.9"


def test_gloo_takes_what_its_variable_names_else_the_first_own_address_of_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name_stands_for(monkeypatch, "10.255.255.254", "127.0.0.1", "::1")  # the first is not this host's
    found = interface.taken_by("gloo")
    assert (found.address, found.interface) == ("127.0.0.1", "lo")
    assert found.why.startswith("what the host's name, ")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # not gloo's
    assert interface.taken_by("gloo") == found
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interface.taken_by("gloo") == ("gloo", "127.0.0.1", "lo", "GLOO_SOCKET_IFNAME=lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert interface.taken_by("gloo").address is None


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("", "ib0"),
        ("^ib", "eth0"),
        ("^ib,eth", "docker0"),
        ("^ib,eth,docker", "lo"),
        ("eth", "eth0"),
        ("=docker0", "docker0"),
        ("ens", None),
    ],
    ids=str,
)
def test_nccl_takes_infiniband_then_a_card_and_this_host_alone_last(
    monkeypatch: pytest.MonkeyPatch, wanted: str, taken: str | None
) -> None:
    names = ["lo", "docker0", "eth0", "ib0"]
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    monkeypatch.setattr(interface, "_address", lambda name: f"10.0.0.{names.index(name)}")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", wanted)
    assert interface.taken_by("nccl").interface == taken
