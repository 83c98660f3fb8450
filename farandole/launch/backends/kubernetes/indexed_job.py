"""An Indexed Job: pod i is node i. A headless Service gives each pod a name that others resolve."""

from __future__ import annotations

from farandole.launch.backends.kubernetes.options import KubernetesOptions
from farandole.launch.backends.kubernetes.pod import CONTAINER, Manifest, pod_spec, variable
from farandole.launch.engines.request import EngineRequest
from farandole.worker.signals import exit_code_of

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_PORT = 29_500  # each job has an address of its own, so all may have the same port
_LABEL = "app.kubernetes.io/name"


def indexed_job(request: EngineRequest, options: KubernetesOptions, name: str) -> list[Manifest]:
    """The Service and the Job."""
    place = {} if options.namespace is None else {"namespace": options.namespace}
    metadata = {"name": name, **place, "labels": {_LABEL: name}}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "clusterIP": "None",
                "selector": {"job-name": name},
                # Workers look for rank 0 before any pod is ready.
                "publishNotReadyAddresses": True,
                "ports": [{"name": "rendezvous", "port": _PORT}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": _job_spec(request, options, name),
        },
    ]


def _job_spec(request: EngineRequest, options: KubernetesOptions, name: str) -> Manifest:
    first_pod = f"{name}-0.{name}"
    index = {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    if request.per_node == 1:
        variables = [
            {"name": "RANK", **index},
            variable("WORLD_SIZE", request.nodes),
            variable("LOCAL_RANK", 0),
            variable("LOCAL_WORLD_SIZE", 1),
            variable("MASTER_ADDR", first_pod),
            variable("MASTER_PORT", _PORT),
        ]
    else:
        variables = [{"name": "NODE_RANK", **index}]
    torchrun = [
        *(f"--nnodes={request.nodes}", f"--nproc-per-node={request.per_node}"),
        *("--node-rank=$(NODE_RANK)", f"--master-addr={first_pod}", f"--master-port={_PORT}"),
    ]
    spec = pod_spec(request, options, name, variables, torchrun)
    return {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        # A failure ends the workers of all pods, so each restart counts once for every pod.
        "backoffLimit": request.restarts * request.nodes,
        "podFailurePolicy": {"rules": _rules()},
        "template": {
            "metadata": {"labels": {_LABEL: name}},
            "spec": {"subdomain": name, **spec},
        },
    }


def _rules() -> list[Manifest]:
    """A pod that was evicted, or that saved and left because it or another one was, starts again
    without counting as a failure. One that was called wrongly fails the whole Job."""
    saved = [exit_code_of(name) for name in ("SIGTERM", "SIGUSR1")]
    return [
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": sorted(saved)},
        },
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [2]},
        },
    ]
