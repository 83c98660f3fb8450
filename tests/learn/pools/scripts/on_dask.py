"""Sums on a Dask cluster of this host."""

from __future__ import annotations

import logging

from distributed import Client, LocalCluster

from farandole.learn.pools.choose import as_pool
from tests.learn.pools.scripts.common import SOURCE, Total, is_expected, try_all

if __name__ == "__main__":
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        try_all(client, kill=True)
        address = cluster.scheduler_address.replace("tcp", "dask")
        with as_pool(address).place(SOURCE) as placed:
            print("by address:", is_expected(placed, Total()))
