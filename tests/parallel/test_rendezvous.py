"""Processes of a restarted group meet in a store of their own, and use a network that others can reach."""

import os
import socket

import pytest
from torch.distributed import TCPStore

from pretrain.errors import InputError
from pretrain.parallel.rendezvous import (
    choose_interface,
    interfaces_by_address,
    is_loopback,
    local_address_towards,
    meet_afresh,
)


def test_a_restart_has_a_store_of_its_own_and_a_first_attempt_the_launchers(monkeypatch):
    launchers = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launchers.set("addresses", "of the dead")
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launchers.port), "RANK": "0"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    meet_afresh()
    assert {name: os.environ[name] for name in environment} == environment

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    meet_afresh()
    port = int(os.environ["MASTER_PORT"])
    assert port != launchers.port and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    own = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)  # as torch does
    assert not own.check(["addresses"])

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", str(launchers.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    meet_afresh()
    assert int(os.environ["MASTER_PORT"]) == port, "the port that rank 0 has chosen"


ADDRESSES = {"127.0.0.1": "lo", "10.0.0.3": "eth0", "192.168.7.2": "ib0"}


@pytest.fixture
def machine(monkeypatch):
    """The second of two machines, whose own name resolves to itself; how to change what its resolver says."""
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    own, routes = ["127.0.1.1"], {"10.0.0.1": "10.0.0.3"}
    real = socket.getaddrinfo

    def resolve(host, *rest, **named):
        answers = own if host == socket.gethostname() else [host]
        return [entry for answer in answers for entry in real(answer, *rest, **named)]

    monkeypatch.setattr("pretrain.parallel.rendezvous.socket.getaddrinfo", resolve)
    monkeypatch.setattr("pretrain.parallel.rendezvous.interfaces_by_address", lambda: ADDRESSES)
    monkeypatch.setattr("pretrain.parallel.rendezvous.local_address_towards", routes.get)
    yield own
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


def test_gloo_speaks_over_the_route_to_the_main_address(machine, capsys):
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "gloo uses eth0, the route to 10.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "reason", ["the user has named one", "the name leads elsewhere", "one machine"], ids=lambda reason: reason
)
def test_the_interface_is_left_alone_where(machine, monkeypatch, reason):
    if reason == "the user has named one":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    elif reason == "the name leads elsewhere":
        machine[:] = ["127.0.1.1", "10.0.0.3"]
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    choose_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before


def test_several_interfaces_and_no_route_are_the_users_choice(machine, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")  # the main machine's own name
    with pytest.raises(InputError, match=r"set GLOO_SOCKET_IFNAME .* one of eth0, ib0"):
        choose_interface()
    monkeypatch.setattr(
        "pretrain.parallel.rendezvous.interfaces_by_address", lambda: {"127.0.0.1": "lo", "10.0.0.3": "eth0"}
    )
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0", "the only one"


def test_this_machines_interfaces_and_routes():
    assert is_loopback(next(address for address, name in interfaces_by_address().items() if name.startswith("lo")))
    assert local_address_towards("127.0.0.1") is None
    if address := local_address_towards("192.0.2.1"):  # reserved for documentation: the default route, if there is one
        assert address in interfaces_by_address()
