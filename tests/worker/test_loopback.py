"""On one host nothing listens beyond loopback; on several, the others must get in."""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
import pytest

from farandole.worker.loopback import reachable, serve_tcp_store, stay_on_loopback


def test_pytorchs_store_listens_where_it_is_told_alone(free_port: str) -> None:
    store = serve_tcp_store(timedelta(seconds=5), "127.0.0.1", int(free_port))
    listening = [
        end.laddr.ip
        for end in psutil.Process().net_connections("tcp")
        if end.status == psutil.CONN_LISTEN and end.laddr.port == store.port
    ]
    assert listening == ["127.0.0.1"]
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("name", "resolved", "listen"),
    [
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("node03", "10.0.0.3", "10.0.0.3"),
        ("node03", "127.0.1.1", "0.0.0.0"),  # Debian's /etc/hosts on node03 itself
    ],
)
def test_where_to_listen_for_other_hosts(
    monkeypatch: pytest.MonkeyPatch, name: str, resolved: str, listen: str
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", {name: resolved}.__getitem__)
    assert reachable(name) == listen


def test_the_interface_is_loopback_unless_another_was_chosen() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth7"}
    stay_on_loopback(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"}
