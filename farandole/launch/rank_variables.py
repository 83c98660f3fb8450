"""The variables that tell a worker its rank; `farandole.worker.environment` reads them.

They are those of TorchElastic's agent. Scripts written for Horovod may look for its own names too.
"""

from __future__ import annotations

import os

from farandole.topology import Topology


def rank_variables(topology: Topology, rank: int, identity: str) -> dict[str, str]:
    """Those of one rank of the job with this `identity`. `LauncherEndpoint` has the rest."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(topology.local_rank(rank)),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": str(topology.host_index(rank)),
        "WORLD_SIZE": str(topology.size),
        "LOCAL_WORLD_SIZE": str(topology.local_size(rank)),
        "ROLE_WORLD_SIZE": str(topology.size),
        "GROUP_WORLD_SIZE": str(len(topology.hosts)),
        "ROLE_NAME": "worker",
        "TORCHELASTIC_RUN_ID": identity,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def horovod_rank_variables(topology: Topology, rank: int) -> dict[str, str]:
    """The same in Horovod's words. `cross` counts the hosts that have such a local rank."""
    local = topology.local_rank(rank)
    peers = [host.ranks[local] for host in topology.hosts if len(host.ranks) > local]
    return {
        "HOROVOD_HOSTNAME": topology.host(rank).name,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(topology.size),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(topology.local_size(rank)),
        "HOROVOD_CROSS_RANK": str(peers.index(rank)),
        "HOROVOD_CROSS_SIZE": str(len(peers)),
    }
