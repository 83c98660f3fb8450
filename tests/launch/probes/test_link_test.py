"""The test of a link: figures for those that hold the token, nothing for anybody else."""

from __future__ import annotations

import contextlib
import socket

import pytest

from farandole.launch.probes import link_test
from farandole.launch.probes.link_test import Listener, measure
from farandole.worker.store.address import new_token
from farandole.worker.store.protocol import ProtocolError


def test_figures_of_the_loopback_interface() -> None:
    token = new_token()
    with Listener("127.0.0.1", token) as listener:
        found = measure("127.0.0.1", listener.port, token, bandwidth=True)
        assert found.to_bytes_per_second is not None
        assert found.back_bytes_per_second is not None
        assert min(found.to_bytes_per_second, found.back_bytes_per_second) > 1e6
        assert 0 < found.latency_seconds < 10
        only = measure("127.0.0.1", listener.port, token, bandwidth=False)
        assert only.to_bytes_per_second is None
    with pytest.raises(OSError, match="refused"):
        measure("127.0.0.1", listener.port, token, bandwidth=False)


def test_strangers_get_nothing_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    token = new_token()
    with Listener("127.0.0.1", token) as listener:
        with pytest.raises((ProtocolError, OSError)):
            measure("127.0.0.1", listener.port, new_token(), bandwidth=True)
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            stranger.settimeout(100)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                answer = stranger.recv(100)
            assert answer == b""  # the connection is closed without a word
        monkeypatch.setattr(link_test, "_CONNECT_SECONDS", 0.2)
        with socket.create_connection(("127.0.0.1", listener.port)):  # who says nothing
            assert measure("127.0.0.1", listener.port, token, bandwidth=False).latency_seconds > 0
