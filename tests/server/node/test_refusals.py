"""What is refused is refused for good: whoever dies meanwhile, nobody is told that it was taken,
and what follows it is."""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from farandole.server.protocol.messages import Command, Kind
from farandole.server.tables import Table
from tests.server.simulation import Cluster

TABLE = Table("t", 1, 1, "float64", "add", 1, 1)
PUSHES = 6


def ask(cluster: Cluster, name: bytes, value: float) -> int:
    values = torch.tensor([value], dtype=torch.float64)
    ticket = cluster.clients[name].ask(Command(Kind.PUSH, 0, table=TABLE.id, stop=1, values=values))
    cluster.settle(name)
    return ticket


@settings(max_examples=150, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 10**9), kills=st.integers(0, 2), several=st.booleans())
def test_refusals_outlive_servers(seed, kills, several):
    cluster = Cluster(seed, servers=3, replicas=2, ranges=1, workers=1)
    ((name, client),) = cluster.clients.items()
    cluster.run_quiet()
    client.ask(Command(Kind.CREATE, 0, text=TABLE.to_json()))
    cluster.settle(name)
    good, bad, left = set(), set(), PUSHES

    def events():
        nonlocal left, kills
        if left and (several or not client.open_tickets):
            left -= 1
            bad.add(ask(cluster, name, float("nan")))
            good.add(ask(cluster, name, 1.0))
        if kills and cluster.random.random() < 0.1:
            victim = cluster.random.choice(list(cluster.nodes))
            if cluster.can_kill(victim):
                cluster.kill(victim)
                kills -= 1
        if cluster.undetected and cluster.random.random() < 0.2:
            cluster.detect()

    cluster.run_until(lambda: not left and not client.open_tickets, events, 5000)
    cluster.run_quiet()
    refused = {ticket for ticket, answer in client.answers.items() if answer.problem}
    assert refused == bad
    assert good < client.answers.keys()
    for chain in cluster.registrar.view.chains:
        for server in chain.servers:
            shard = cluster.nodes[server].copies[0].range.shards[TABLE.id]
            assert shard.state()[1][0].tolist() == [PUSHES]
