"""Connects the launched processes: sets up their rendezvous store and network interface.

After a restart, torch's launcher passes the first attempt's store to the new processes. Our accelerate configs use a
static rendezvous, so this store still contains the dead processes' addresses, and the new processes would wait for
them and fail.
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

from pretrain.errors import InputError, is_first_on_machine
from pretrain.mesh_sizes import processes_here, processes_launched

INTERFACE_SETTINGS = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""{variable: format for an interface name}. NCCL treats a name without '=' as a prefix."""
PATIENCE = timedelta(minutes=5)
"""Timeout for connecting to the first process, which may be on another machine."""
READING = timedelta(hours=1)
"""How long to wait for a text or a port from the first process.

It may be reading shards. After a crash on another machine, it restarts only when its watchdog finds the hang.
"""


@functools.cache
def host_store(address: str, port: int) -> TCPStore:
    """Hosts a store on this port (0: any free port) until this process ends.

    If torch later opens a store on this port in this process, it shares the server.
    """
    return TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)


def renew_store() -> None:
    """Switches a restarted process to a new store, which rank 0 hosts. Does nothing in the first attempt.

    All ranks must call it before init_process_group, because it changes the environment variables read there.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    launchers = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=PATIENCE)
    key = "port-of-attempt-{}".format
    if os.environ["RANK"] == "0":
        # Host the store immediately so that no other process can take the port.
        launchers.set(key(attempt), str(host_store(os.environ["MASTER_ADDR"], 0).port))
    launchers.wait([key(attempt)], READING)  # get() alone would give up after PATIENCE
    while launchers.check([key(attempt + 1)]):  # rank 0 may have restarted more often than this machine
        attempt += 1
    os.environ["MASTER_PORT"] = launchers.get(key(attempt)).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def join_nccl() -> None:
    """Creates the NCCL process group before accelerate does, bound to this process's GPU.

    accelerate uses an existing group. Its own group wouldn't be bound to a device, so each subgroup would create a new
    communicator in its first collective (5 to 20 s on 32 GPUs) instead of splitting an existing one.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
    if local_rank < 0 or dist.is_initialized():
        return
    device = torch.device("cuda", local_rank % torch.cuda.device_count())  # same formula as in accelerate
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)


def text_of_first(subject: str, text: Callable[[], str]) -> str:
    """Calls `text` in the first process, and returns the result in all processes. Doesn't need a process group.

    Every process must call this function once per subject.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_first = os.environ["RANK"] == "0"
    if is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the launcher doesn't host a store
        host_store(address, port)
    store = TCPStore(address, port, is_master=False, timeout=PATIENCE)
    key = f"told-by-first-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{subject}"
    if is_first:
        store.set(key, text())
    store.wait([key], READING)
    return store.get(key).decode()


def choose_interface() -> None:
    """Makes gloo and NCCL use the network interface that routes to the main address, in multi-node runs.

    By default, gloo advertises the address that the host name resolves to, which is 127.0.1.1 on many systems, and
    NCCL uses the first interface, which may be a container bridge. The other machines then hang. This function sets
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME unless they are already set. Raises InputError if gloo would fail and the
    interface is ambiguous.
    """
    machines = processes_launched() // processes_here()
    unset = [variable for variable in INTERFACE_SETTINGS if not os.environ.get(variable)]
    if machines < 2 or not unset:
        return
    main = os.environ.get("MASTER_ADDR", "")
    interfaces = interfaces_by_address()
    name = interfaces.get(local_address_towards(main))
    if name is None:  # on the main machine, if its name resolves to loopback
        others = sorted({interface for address, interface in interfaces.items() if not is_loopback(address)})
        if len(others) != 1:
            if "GLOO_SOCKET_IFNAME" in unset and own_name_is_loopback():
                raise InputError(
                    f"launcher: the run uses {machines} machines, but the host name {socket.gethostname()} resolves "
                    "only to loopback; set GLOO_SOCKET_IFNAME to the network interface that the other machines can "
                    f"reach (active interfaces: {', '.join(others) or 'none found'})"
                )
            return
        name = others[0]
    os.environ.update({variable: INTERFACE_SETTINGS[variable].format(name) for variable in unset})
    if is_first_on_machine():
        print(
            f"{socket.gethostname()}: {' and '.join(unset)} set to {name}, the interface that routes to {main}; set "
            "them before launching to override this",
            file=sys.stderr,
            flush=True,
        )


def own_name_is_loopback() -> bool:
    """Returns True if this machine's host name resolves only to loopback addresses."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return True  # gloo then uses 127.0.0.1
    return all(is_loopback(address) for address in found)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interfaces_by_address() -> dict[str, str]:
    """Returns {IP address: interface} for this machine's active interfaces."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def local_address_towards(host: str) -> str | None:
    """Returns this machine's address on the route to a host, or None for loopback. Doesn't send packets."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as udp, suppress(OSError):
                udp.connect(address)  # connecting a datagram socket only selects the route
                local = udp.getsockname()[0].partition("%")[0]
                if not is_loopback(local):
                    return local
    return None
