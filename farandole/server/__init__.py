"""The sharded parameter server: tables that many workers push to and read from.

    with fd.server.Cluster(servers=2, replicas=1) as cluster:
        with fd.server.connect(cluster.address, cluster.key_file) as store:
            store.create("weights", rows=1_000_000, rule="adagrad")
            store.push("weights", gradient, rate=0.1)

What is where:

    cluster, client/store     what a script uses
    tables                    which range holds a row
    client/    a worker's end: requests, what is pending (no sockets), connections, the registrar
    node/      a server: table shards, ranges, chain replication (no sockets), the service around it
    registrar/ who takes part, which servers hold which range (no sockets), the service around it
    protocol/  messages, their bytes, seals, sockets, shared memory
    rules/     what a table does with what is pushed;  filters/  how less is sent
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
