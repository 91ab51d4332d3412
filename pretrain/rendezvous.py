"""Where the processes of a restarted group meet.

torch's launcher gives every restart the store of the first attempt, in which its static rendezvous, the one of our
launcher files, leaves the addresses of the processes that have died: the new ones would wait for them and fail.
"""

import os
from datetime import timedelta

from torch.distributed import TCPStore

OWN: list[TCPStore] = []
"""The store that this process hosts, kept for as long as it lives."""
PATIENCE = timedelta(minutes=5)
"""How long processes wait for the first one, which may be on another machine."""


def meet_afresh() -> None:
    """Points a restarted process to a store of this attempt's own, which its rank 0 hosts; the first attempt has one.

    Changes the environment that torch's init_process_group reads. All ranks call, before it.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    launchers = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=PATIENCE)
    key = f"port-of-attempt-{attempt}"
    if os.environ["RANK"] == "0":
        # Hosted from here on, so that nobody takes the port meanwhile; what torch opens then is the same server.
        OWN[:] = [TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, multi_tenant=True)]
        launchers.set(key, str(OWN[0].port))
    os.environ["MASTER_PORT"] = launchers.get(key).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
