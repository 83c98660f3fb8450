"""A server whose clients never stop sending still beats, and ends when it is told to."""

from __future__ import annotations

import time

from farandole.server import Cluster
from farandole.server.channels import Port


def test_busy_clients_do_not_keep_it_from_the_registrar(monkeypatch):
    receive = Port.receive

    def endless(port):
        while True:
            yield from receive(port)
            yield b"a client", []

    monkeypatch.setattr(Port, "receive", endless)
    with Cluster(servers=1, in_threads=True) as cluster:
        beats = []
        deadline = time.monotonic() + 150
        while len(beats) < 3:
            assert time.monotonic() < deadline, "it does not beat"
            (facts,) = cluster.facts().values()
            if facts and not any(facts is beat for beat in beats):
                beats.append(facts)
            time.sleep(0.01)
        assert cluster.check() == []
