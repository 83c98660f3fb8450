"""Chains under any order of events: nothing acknowledged is lost or counted twice, every read keeps
its bound, and replicas hold the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from farandole.server.tables import Table
from tests.server.simulation import Cluster, Worker

CLOCKS = 4
# A smaller seed is not a simpler case: shrinking would only take time.
UNSHRUNK = [Phase.explicit, Phase.reuse, Phase.generate]
RANGES = 3


def make(seed: int, servers: int, replicas: int, workers: int, bound: int):
    cluster = Cluster(seed, servers, replicas, RANGES, workers)
    # One block in each range, with a row for every worker.
    table = Table("t", workers * RANGES, 1, "float64", "add", workers, RANGES)
    team = [
        Worker(cluster, name, row, table, bound) for row, name in enumerate(list(cluster.clients))
    ]
    return cluster, table, team


def check_bound(worker: Worker, team: list[Worker], bound: int) -> None:
    for clock, rows in worker.seen:
        assert rows[worker.row] == clock  # all its own
        for other in team:
            assert rows[other.row] >= clock - bound  # every update stamped clock − bound − 1
            assert rows[other.row] <= other.clock


def check_replicas(cluster: Cluster, table: Table, expected: list[float]) -> None:
    """All replicas of all ranges hold exactly this, to the last bit and count."""
    for number, chain in enumerate(cluster.registrar.view.chains):
        states = [cluster.nodes[server].copies[number].range.state() for server in chain.servers]
        for text, tensors in states:
            assert text == states[0][0]
            assert all(torch.equal(a, b) for a, b in zip(tensors, states[0][1], strict=True))
        shard = cluster.nodes[chain.servers[0]].copies[number].range.shards[table.id]
        weight = shard.state()[1][0]
        assert weight.tolist() == expected


@settings(max_examples=60, deadline=None, phases=UNSHRUNK)
@given(
    seed=st.integers(0, 10**9),
    servers=st.integers(1, 4),
    workers=st.integers(1, 4),
    bound=st.sampled_from([0, 1, 3, 100]),
    data=st.data(),
)
def test_any_interleaving(seed, servers, workers, bound, data):
    replicas = data.draw(st.integers(0, servers - 1))
    cluster, table, team = make(seed, servers, replicas, workers, bound)

    def events():
        cluster.random.choice(team).step(CLOCKS)

    cluster.run_until(lambda: all(w.is_done(CLOCKS) for w in team), events, 20_000)
    cluster.run_quiet()
    for worker in team:
        assert worker.acknowledged == CLOCKS * RANGES
        check_bound(worker, team, bound)
    check_replicas(cluster, table, [float(CLOCKS)] * workers)


@settings(max_examples=80, deadline=None, phases=UNSHRUNK)
@given(
    seed=st.integers(0, 10**9),
    servers=st.integers(2, 5),
    workers=st.integers(1, 3),
    bound=st.sampled_from([0, 1, 3]),
    data=st.data(),
)
def test_servers_die_and_come_while_training_goes_on(seed, servers, workers, bound, data):
    replicas = data.draw(st.integers(1, servers - 1))
    cluster, table, team = make(seed, servers, replicas, workers, bound)
    kills, arrivals = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2))

    def events():
        nonlocal kills, arrivals
        chance = cluster.random.random()
        if kills and chance < 0.02:
            victim = cluster.random.choice(list(cluster.nodes))
            if cluster.can_kill(victim):
                cluster.kill(victim)
                kills -= 1
        elif arrivals and chance > 0.98:
            cluster.add_server()
            arrivals -= 1
        elif cluster.undetected and chance < 0.1:
            cluster.detect()
        cluster.random.choice(team).step(CLOCKS)

    cluster.run_until(lambda: all(w.is_done(CLOCKS) for w in team), events, 20_000)
    cluster.run_quiet()
    assert not cluster.registrar.lost
    assert cluster.registrar.is_settled == (len(cluster.nodes) > replicas)
    confirmed = {number: node.confirmed() for number, node in cluster.nodes.items()}
    missing = RANGES * max(0, replicas + 1 - len(cluster.nodes))
    assert cluster.registrar.missing_copies(confirmed) == missing
    for worker in team:
        assert worker.acknowledged == CLOCKS * RANGES
        check_bound(worker, team, bound)
    check_replicas(cluster, table, [float(CLOCKS)] * workers)
    for chain in cluster.registrar.view.chains:
        assert len(chain.servers) == min(replicas + 1, len(cluster.nodes))
    held = {(number, server) for server, node in cluster.nodes.items() for number in node.copies}
    wanted = {
        (number, server)
        for number, chain in enumerate(cluster.registrar.view.chains)
        for server in chain.servers
    }
    assert held == wanted  # nobody keeps what it should not have any more


@settings(max_examples=40, deadline=None, phases=UNSHRUNK)
@given(seed=st.integers(0, 10**9), bound=st.sampled_from([0, 2]))
def test_a_lost_worker_is_only_missed(seed, bound):
    cluster, _table, team = make(seed, 2, 1, 3, bound)
    lost = cluster.random.choice(team)
    others = [worker for worker in team if worker is not lost]
    stop_at = cluster.random.randrange(CLOCKS)

    def events():
        if lost.name in cluster.clients and lost.clock >= stop_at and cluster.random.random() < 0.1:
            cluster.lose_worker(lost.name)
        able = [
            w for w in team if w.name in cluster.clients and not (w is lost and w.clock >= stop_at)
        ]
        if able:
            cluster.random.choice(able).step(CLOCKS)

    cluster.run_until(lambda: all(w.is_done(CLOCKS) for w in others), events, 20_000)
    for worker in others:
        for clock, rows in worker.seen:
            for other in others:
                assert rows[other.row] >= clock - bound


def test_without_a_tick_nobody_runs_ahead_of_the_bound():
    cluster, _table, team = make(0, 2, 1, 2, 2)
    fast, slow = team
    slow.step(0)  # creates its table, and then stands still

    def events():
        fast.step(100)

    with pytest.raises(AssertionError, match="not over"):
        cluster.run_until(lambda: fast.is_done(100), events, 3000)
    assert fast.clock == 3  # reads of clock 3 wait for the other to end clock 0


def test_data_without_a_replica_is_lost_and_said_so():
    cluster, _table, team = make(0, 2, 0, 1, 0)
    cluster.run_until(lambda: team[0].is_done(1), lambda: team[0].step(1), 10_000)
    cluster.kill(1)
    cluster.detect()
    lost = cluster.registrar.lost
    assert lost
    assert all(cluster.registrar.view.chains[number].head is None for number in lost)
