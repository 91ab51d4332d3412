"""Processes of a restarted group meet in a store of their own."""

import os

from torch.distributed import TCPStore

from pretrain.rendezvous import meet_afresh


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
