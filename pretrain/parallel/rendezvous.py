"""Rendezvous of the launched processes: the store through which they meet, and the network that they use.

After a restart, torch's launcher gives processes the store of the first attempt. With its static rendezvous, which our
accelerate configs use, that store still has the addresses of dead processes: new ones would wait for them and fail.
"""

import functools
import ipaddress
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from pretrain.errors import InputError

INTERFACE_SETTINGS = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""{variable: format of an interface's name}; NCCL treats a name as a prefix unless it follows '='."""
PATIENCE = timedelta(minutes=5)
"""How long processes wait for the first one, which may be on another machine."""
READING = timedelta(hours=1)
"""How long the first process may take to read what it sends to the others."""


@functools.cache
def host_store(address: str, port: int) -> TCPStore:
    """Hosts a store at this port, or any free one if it is 0, for the lifetime of this process.

    If torch later opens a store at this port in this process, it uses the same server.
    """
    return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def renew_store() -> None:
    """Points a restarted process to a new store, which rank 0 hosts for this attempt; the first attempt needs none.

    Changes the environment that init_process_group reads; all ranks must call it before that.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    launchers = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=PATIENCE)
    key = f"port-of-attempt-{attempt}"
    if os.environ["RANK"] == "0":
        # Hosted immediately, so that no other process can take the port.
        launchers.set(key, str(host_store(os.environ["MASTER_ADDR"], 0).port))
    os.environ["MASTER_PORT"] = launchers.get(key).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def join_nccl() -> None:
    """Creates the process group on GPUs, with its communicator bound to this process's GPU, before accelerate would.

    accelerate uses an existing group. Its own would not be bound to a device: each group would then create its
    communicator in its first collective, in 5 to 20 s on 32 GPUs, instead of splitting an existing one. accelerate
    still creates gloo's group.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    if local_rank < 0 or dist.is_initialized():
        return
    device = torch.device("cuda", local_rank % torch.cuda.device_count())  # as accelerate counts
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)


def text_of_first(subject: str, text: Callable[[], str]) -> str:
    """Returns the first process's `text()` in every launched process, before they form a process group.

    All processes call it, once for each subject.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_first = os.environ["RANK"] == "0"
    if is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the launcher hosts no store
        host_store(address, port)
    store = TCPStore(address, port, is_master=False, timeout=PATIENCE)
    key = f"told-by-first-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{subject}"
    if is_first:
        store.set(key, text())
    store.wait([key], READING)
    return store.get(key).decode()


def choose_interface() -> None:
    """Makes gloo and NCCL use the network interface that routes to the main address, in runs on several machines.

    By default, gloo advertises the address of the host's own name, on many systems 127.0.1.1, and NCCL that of the
    first interface, which may be a container bridge; the other machines then hang. Sets GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME unless the user has. Raises InputError if gloo would fail and the interface is ambiguous.
    """
    machines = int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    unset = [variable for variable in INTERFACE_SETTINGS if not os.environ.get(variable)]
    if machines < 2 or not unset:
        return
    main = os.environ.get("MASTER_ADDR", "")
    interfaces = interfaces_by_address()
    name = interfaces.get(local_address_towards(main))
    if name is None:  # on the main machine, if its name resolves to loopback
        others = sorted({interface for address, interface in interfaces.items() if not is_loopback(address)})
        if len(others) != 1 and "GLOO_SOCKET_IFNAME" in unset and own_name_is_loopback():
            raise InputError(
                f"launcher: {machines} machines, but the host name {socket.gethostname()} resolves to loopback only "
                "here; set GLOO_SOCKET_IFNAME to the interface of the network by which the others reach this machine, "
                f"one of {', '.join(others) or 'none that is up'}"
            )
        if len(others) != 1:
            return
        name = others[0]
    os.environ.update({variable: INTERFACE_SETTINGS[variable].format(name) for variable in unset})
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"{socket.gethostname()}: {' and '.join(unset)} set to {name}, the route to {main}; set others beforehand",
            file=sys.stderr,
            flush=True,
        )


def own_name_is_loopback() -> bool:
    """Tells if no address of this host's name could be used by another machine."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return True  # gloo then uses 127.0.0.1
    return all(is_loopback(address) for address in found)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interfaces_by_address() -> dict[str, str]:
    """Returns {IP address: interface} of this machine's interfaces that are up."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def local_address_towards(host: str) -> str | None:
    """Returns this machine's address on the route to a host; None if there is only loopback. Sends nothing."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as udp, suppress(OSError):
                udp.connect(address)  # on a datagram socket this only selects the route
                local = udp.getsockname()[0].partition("%")[0]
                if not is_loopback(local):
                    return local
    return None
