"""A Ray cluster of two nodes on this machine. Prints its address, and ends when its input does.

A line of input makes it lose the second node.
"""

import sys

from ray.cluster_utils import Cluster

MEMORY_BYTES = 100 * 2**20
cluster = Cluster()
cluster.add_node(num_cpus=1, object_store_memory=MEMORY_BYTES, include_dashboard=False)
second = cluster.add_node(num_cpus=1, object_store_memory=MEMORY_BYTES)
try:
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        print("lost", flush=True)
        sys.stdin.readline()
finally:
    cluster.shutdown()
