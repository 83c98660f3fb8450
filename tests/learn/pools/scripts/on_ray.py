"""Sums on a Ray cluster of this host."""

from __future__ import annotations

import ray

from tests.learn.pools.scripts.common import try_all

ray.init(num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
try_all("ray", kill=True)
