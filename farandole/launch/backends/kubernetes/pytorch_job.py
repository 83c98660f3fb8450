"""Kubeflow's PyTorchJob: its operator sets the addresses and ranks of the pods."""

from __future__ import annotations

from farandole.launch.backends.kubernetes.options import KubernetesOptions
from farandole.launch.backends.kubernetes.pod import Manifest, pod_spec, variable
from farandole.launch.engines.request import EngineRequest


def pytorch_job(request: EngineRequest, options: KubernetesOptions, name: str) -> list[Manifest]:
    # The operator sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, and for torchrun the same as
    # PET_MASTER_ADDR, PET_NODE_RANK and so on.
    variables = (
        [variable("LOCAL_RANK", 0), variable("LOCAL_WORLD_SIZE", 1)]
        if request.per_node == 1
        else []
    )
    torchrun = [f"--nnodes={request.nodes}", f"--nproc-per-node={request.per_node}"]
    spec = pod_spec(request, options, name, variables, torchrun)
    replica = {
        # OnFailure starts the container again where it failed, up to the backoffLimit.
        "restartPolicy": "OnFailure" if request.restarts else "Never",
        "template": {"spec": {key: spec[key] for key in spec if key != "restartPolicy"}},
    }
    replicas = {"Master": {"replicas": 1, **replica}}
    if request.nodes > 1:
        replicas["Worker"] = {"replicas": request.nodes - 1, **replica}
    place = {} if options.namespace is None else {"namespace": options.namespace}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name, **place},
            "spec": {
                "nprocPerNode": str(request.per_node),
                "runPolicy": {
                    "cleanPodPolicy": "None",
                    "backoffLimit": request.restarts * request.nodes,
                },
                "pytorchReplicaSpecs": replicas,
            },
        }
    ]
