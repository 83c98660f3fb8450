"""The pod of each node: what it runs, its variables, resources and volumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farandole.environment import GRACE, NAME, TOKEN
from farandole.launch.backends.kubernetes.options import KubernetesOptions
from farandole.launch.engines.request import EngineRequest

Manifest = dict[str, Any]

CONTAINER = "pytorch"
"""Kubeflow's operator looks for the container of this name."""

_STOP_MARGIN_SECONDS = 10  # between the end of the workers' grace and SIGKILL


def pod_spec(
    request: EngineRequest,
    options: KubernetesOptions,
    name: str,
    variables: Sequence[Manifest],
    torchrun: Sequence[str],
) -> Manifest:
    """`variables` are those of the kind of job, and `torchrun` the words that stand before the
    script where a pod has several workers."""
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    limit = {} if options.shm is None else {"sizeLimit": options.shm}
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory", **limit}}]
    for index, (claim, path) in enumerate(options.mounts):
        mounts.append({"name": f"volume-{index}", "mountPath": path})
        volumes.append(
            {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}},
        )
    container = {
        "name": CONTAINER,
        "image": options.image,
        "command": _command(request, torchrun),
        "env": [*variables, *_asked(request, options, name)],
        "resources": _resources(request, options),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(request.grace_seconds) + _STOP_MARGIN_SECONDS,
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }


def _command(request: EngineRequest, torchrun: Sequence[str]) -> list[str]:
    words = [literal(word) for word in request.command]
    return ["torchrun", *torchrun, *words] if request.per_node > 1 else ["python", *words]


def literal(text: str) -> str:
    """As Kubernetes must be given a text in which it shall expand nothing: it reads `$(NAME)`."""
    return text.replace("$", "$$")


def variable(name: str, value: object) -> Manifest:
    return {"name": name, "value": literal(str(value))}


def _asked(request: EngineRequest, options: KubernetesOptions, name: str) -> list[Manifest]:
    """What the user has asked for. A fixed name lets a pod that starts again resume."""
    asked: Mapping[str, str] = {
        **request.variables(request.workers),
        NAME: name,
        GRACE: f"{request.grace_seconds:g}",
        "PYTHONUNBUFFERED": "1",
    }
    found = [variable(key, value) for key, value in sorted(asked.items())]
    if options.token_source is not None:
        secret, key = options.token_source
        found.append(
            {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}},
        )
    return found


def _resources(request: EngineRequest, options: KubernetesOptions) -> Manifest:
    cores = None if options.cpus is None else str(options.cpus * request.per_node)
    asked = {"cpu": cores, "memory": options.memory}
    requests = {key: value for key, value in asked.items() if value is not None}
    # CPUs are asked for and not limited: a limit would slow the workers down, not protect others.
    limits = {key: value for key, value in requests.items() if key == "memory"}
    if options.gpus:
        limits["nvidia.com/gpu"] = str(options.gpus)
    found = {"requests": requests, "limits": limits}
    return {key: value for key, value in found.items() if value}
