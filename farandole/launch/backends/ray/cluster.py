"""The connection to a Ray cluster, and what it has."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any

from farandole.errors import LaunchError, UserError

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class RayOptions:
    """As given; None: not given."""

    cpus: int | None = None  # cores of each worker
    gpus: int | None = None  # of each node
    ray_address: str | None = None


def import_ray() -> Any:
    """The package. Raises `UserError` saying how to get it."""
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"--on ray needs the package ray, and it cannot be imported ({error}): "
            "pip install 'farandole[ray]'"
        ) from error
    return ray


def check_address(address: str) -> None:
    """Raises `UserError` for one that no job can use, `LaunchError` if nobody listens there."""
    if address == "local":
        raise UserError(
            "--ray-address local: Ray would start a cluster of its own, of this host alone. Start "
            "one with `ray start --head`, or leave Ray out: farandole run -n 2 …"
        )
    if address.startswith("ray://"):
        raise UserError(
            f"--ray-address {address}: through Ray's client the workers could not reach this host. "
            "Run the command on a node of the cluster, or submit it: ray job submit -- farandole "
            "run --on ray …"
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        # Ray would try for minutes, without a word.
        try:
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise no_cluster(address, f"{error}.") from error


def connect(address: str, namespace: str) -> None:
    """Raises `LaunchError` where there is no cluster.

    Ray may end the process instead: see `probe.find_cluster`.
    """
    ray = import_ray()
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,  # the launcher shows what the workers print
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise no_cluster(address, str(error).strip().splitlines()[0]) from error


def no_cluster(address: str, why: str) -> LaunchError:
    """The error to raise. `why` is a sentence."""
    return LaunchError(
        f"there is no Ray cluster at {address!r}: {why} Start one with `ray start --head`, or name "
        "it: --ray-address HOST:6379"
    )


def described(ray: Any) -> str:
    """The nodes that are alive, with what each has, for people."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = [
        f"{node['NodeManagerHostname']} ({node['Resources'].get('CPU', 0):g} CPUs, "
        f"{node['Resources'].get('GPU', 0):g} GPUs)"
        for node in nodes
    ]
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}: {', '.join(each)}"
