"""`--on kubernetes`: writes the manifest of the job. `kubectl apply -f` starts it."""

from __future__ import annotations

from typing import Any

import click
import yaml

from farandole.errors import UserError
from farandole.files import write_whole
from farandole.launch.backends.kubernetes.indexed_job import indexed_job
from farandole.launch.backends.kubernetes.options import KubernetesOptions, job_name
from farandole.launch.backends.kubernetes.pytorch_job import pytorch_job
from farandole.launch.engines.request import EngineRequest
from farandole.launch.messages import tell


def start(request: EngineRequest) -> int:
    """Writes the manifest to --output, or to standard output. Raises `UserError`."""
    options = KubernetesOptions(**request.settings)
    _check(request, options)
    text = manifest(request, options)
    if options.output is None:
        click.echo(text, nl=False)
    else:
        write_whole(options.output, text.encode())
        tell(f"wrote {options.output}: kubectl apply -f {options.output}")
    if request.nodes > 1 and options.token_source is None:
        tell(
            "the manifest names no token: whoever reaches the pods can connect to the store in "
            "which the workers find each other. See docs/engines.md, Kubernetes"
        )
    return 0


def _check(request: EngineRequest, options: KubernetesOptions) -> None:
    if options.token_source is not None and request.per_node > 1:
        raise UserError(
            f"--token-secret with --per-node {request.per_node}: several workers of a pod are "
            "started by torchrun, whose store asks for no token. Give each worker a pod "
            f"(--nodes {request.workers} --per-node 1), or leave --token-secret out and restrict "
            "who reaches the pods with a NetworkPolicy."
        )


def manifest(request: EngineRequest, options: KubernetesOptions) -> str:
    """As YAML, one document for each object."""
    name = job_name(request.name, request.script)
    make = pytorch_job if options.kind == "pytorchjob" else indexed_job
    return str(
        yaml.dump_all(make(request, options, name), Dumper=_Plain, sort_keys=False, width=100)
    )


class _Plain(yaml.SafeDumper):
    """Writes a value out each time that it occurs, instead of referring to the first."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
