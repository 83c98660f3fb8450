"""The sharded parameter server: tables that many workers push to and read from.

    with fd.server.Cluster(servers=2, replicas=1) as cluster:
        with fd.server.connect(cluster.address, cluster.key_file) as store:
            store.create("weights", rows=1_000_000, rule="adagrad")
            store.push("weights", gradient, rate=0.1)

What is where:

    tables, ring      which range holds a row, and which servers a range
    shard, range      a range's values, rules and clocks: the state machine that is replicated
    node, registrar   chains of replicas, and who is in them (no sockets)
    dialogue          what a client has asked and not been answered (no sockets)
    messages, wire, seal, channels, arena    how they talk
    service, desk, conversation, registrar_client     the same at their sockets
    store, cluster    what a script uses
"""

from __future__ import annotations

from farandole.server.client.calls import Pending
from farandole.server.client.filtered import Filtered
from farandole.server.client.store import Store
from farandole.server.client.tasks import Tasks
from farandole.server.cluster import Cluster
from farandole.server.tables import Table

connect = Store

__all__ = ["Cluster", "Filtered", "Pending", "Store", "Table", "Tasks", "connect"]
