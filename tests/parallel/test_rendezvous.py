"""Restarted process groups must use a new store, and machines must use a reachable network interface."""

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from pretrain.errors import InputError
from pretrain.parallel import rendezvous, strategy
from pretrain.parallel.rendezvous import (
    choose_interface,
    interfaces_by_address,
    is_loopback,
    local_address_towards,
    renew_store,
    text_of_first,
)
from support.project import free_port


def test_a_restart_uses_a_new_store_and_a_first_attempt_the_launchers(monkeypatch):
    launchers = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launchers.set("addresses", "of the dead")
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launchers.port), "RANK": "0"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    renew_store()
    assert {name: os.environ[name] for name in environment} == environment

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    renew_store()
    port = int(os.environ["MASTER_PORT"])
    assert port != launchers.port and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    own = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)  # as torch does
    assert not own.check(["addresses"])

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_PORT", str(launchers.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    renew_store()
    assert int(os.environ["MASTER_PORT"]) == port, "rank 1 must use the port chosen by rank 0"


def test_a_restart_waits_for_a_first_process_that_notices_the_failure_later(monkeypatch):
    """If a process on another machine dies, the first one may hang in a collective until its watchdog ends it."""
    launchers = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launchers.port), "RANK": "1"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "PATIENCE", timedelta(seconds=1))
    restarts = threading.Timer(2.5, launchers.set, ["port-of-attempt-1", "1234"])
    restarts.start()
    renew_store()
    restarts.join()
    assert os.environ["MASTER_PORT"] == "1234"


def test_a_machine_that_restarted_less_often_joins_the_first_process(monkeypatch):
    launchers = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in (1, 2, 3):
        launchers.set(f"port-of-attempt-{attempt}", str(1000 + attempt))
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launchers.port), "RANK": "1"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    renew_store()
    assert os.environ["MASTER_PORT"] == "1003"


@pytest.mark.parametrize("hosted_by", ["launcher", "first process"])
def test_all_processes_get_the_text_of_the_first(monkeypatch, hosted_by):
    rendezvous.host_store.cache_clear()
    launchers = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    is_hosted = hosted_by == "launcher"
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launchers.port if is_hosted else free_port())}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": str(is_hosted)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for attempt in range(2):
        for number in range(2):
            heard = []
            for rank in range(3):
                monkeypatch.setenv("RANK", str(rank))
                monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
                heard.append(text_of_first(str(number), lambda said=f"{attempt} {number} {rank}": said))
            assert heard == [f"{attempt} {number} 0"] * 3
    assert rendezvous.host_store.cache_info().currsize == (0 if is_hosted else 1)


SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ADDRESSES = {"127.0.0.1": "lo", "10.0.0.3": "eth0", "192.168.7.2": "ib0"}


@pytest.fixture
def machine(monkeypatch):
    """Simulates the second of two machines, whose hostname resolves to itself. Yields the resolver's answers."""
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    own, routes = ["127.0.1.1"], {"10.0.0.1": "10.0.0.3"}
    real = socket.getaddrinfo

    def resolve(host, *rest, **named):
        answers = own if host == socket.gethostname() else [host]
        return [entry for answer in answers for entry in real(answer, *rest, **named)]

    monkeypatch.setattr("pretrain.parallel.rendezvous.socket.getaddrinfo", resolve)
    monkeypatch.setattr("pretrain.parallel.rendezvous.interfaces_by_address", lambda: ADDRESSES)
    monkeypatch.setattr("pretrain.parallel.rendezvous.local_address_towards", routes.get)
    yield own
    for name in SETTINGS:
        os.environ.pop(name, None)


def chosen() -> list[str | None]:
    return [os.environ.get(name) for name in SETTINGS]


@pytest.mark.parametrize("resolved", [["127.0.1.1"], ["127.0.1.1", "192.168.7.2"]])
def test_gloo_and_nccl_use_the_interface_that_routes_to_the_main_machine(machine, capsys, resolved):
    machine[:] = resolved
    choose_interface()
    assert chosen() == ["eth0", "=eth0"]
    told = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME set to eth0, the interface that routes to 10.0.0.1"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ["ib0", "=eth0"]),
        ({"NCCL_SOCKET_IFNAME": "ib"}, ["eth0", "ib"]),
        (dict.fromkeys(SETTINGS, "ib0"), ["ib0", "ib0"]),
    ],
)
def test_interfaces_set_by_the_user_are_kept(machine, monkeypatch, named, expected):
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    choose_interface()
    assert chosen() == expected


@pytest.mark.parametrize("reason", ["one machine", "no route, but a reachable hostname"])
def test_no_interface_is_set_if_unnecessary(machine, monkeypatch, reason):
    if reason == "one machine":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    else:
        machine[:] = ["127.0.1.1", "10.0.0.3"]
        monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    choose_interface()
    assert chosen() == [None, None]


def test_with_several_interfaces_and_no_route_the_user_must_choose(machine, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")  # the main machine's own name
    with pytest.raises(InputError, match=r"set GLOO_SOCKET_IFNAME .*active interfaces: eth0, ib0"):
        choose_interface()
    monkeypatch.setattr(
        "pretrain.parallel.rendezvous.interfaces_by_address", lambda: {"127.0.0.1": "lo", "10.0.0.3": "eth0"}
    )
    choose_interface()
    assert chosen() == ["eth0", "=eth0"], "the only interface must be chosen"


def test_this_machines_interfaces_and_routes():
    assert is_loopback(next(address for address, name in interfaces_by_address().items() if name.startswith("lo")))
    assert local_address_towards("127.0.0.1") is None
    if address := local_address_towards(
        "192.0.2.1"
    ):  # an address reserved for documentation, so this uses the default route
        assert address in interfaces_by_address()


@pytest.mark.parametrize(
    ("local_rank", "is_there", "made"),
    [("3", False, [("cuda:1", "nccl", "cuda:1")]), (None, False, []), ("3", True, [])],
    ids=["launched", "alone", "already created"],
)
def test_the_nccl_group_uses_the_same_gpu_as_accelerate(monkeypatch, local_rank, is_there, made):
    """The GPU index is the local rank modulo the number of visible GPUs. Without a launcher, no group is created."""
    seen = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: is_there)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, device_id: seen.extend([backend, device_id]))
    rendezvous.join_nccl()
    assert [tuple(map(str, seen))] * bool(seen) == made


def test_accelerate_creates_the_gloo_group(monkeypatch):
    class Stop(Exception):
        pass

    def stop(self):
        raise Stop

    monkeypatch.setattr(strategy, "join_nccl", lambda: pytest.fail("there is no GPU"))
    monkeypatch.setattr(strategy, "device_type", lambda: "cpu")
    monkeypatch.setattr(strategy, "renew_store", lambda: None)
    monkeypatch.setattr(strategy.Strategy, "make_accelerator", stop)
    with pytest.raises(Stop):
        strategy.Strategy("fp32")
    monkeypatch.setattr(strategy, "device_type", lambda: "cuda")
    with pytest.raises(pytest.fail.Exception):
        strategy.Strategy("fp32")
