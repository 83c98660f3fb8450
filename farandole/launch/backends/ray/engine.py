"""`--on ray`: a placement group of one bundle for each node, and an agent in each.

Ray places the agents and watches them. Gradients travel as in any other job: between the workers.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from farandole.errors import LaunchError
from farandole.launch.backends.ray.channel import RayActors
from farandole.launch.backends.ray.cluster import (
    RayOptions,
    check_address,
    connect,
    described,
    import_ray,
)
from farandole.launch.backends.ray.node import AgentHost
from farandole.launch.backends.ray.probe import find_cluster
from farandole.launch.engines.request import EngineRequest
from farandole.launch.hosts import place_workers
from farandole.launch.job import Job, Outcome
from farandole.launch.launcher import launch_on_hosts
from farandole.launch.messages import tell
from farandole.launch.outcome_text import print_outcome
from farandole.launch.restarting import launch_with_restarts
from farandole.worker.network import address_for

_PLACE_SECONDS = 300.0  # a cluster that grows on demand takes minutes
_NOTE_SECONDS = 10.0
_ACTOR_SECONDS = 100.0
_CALLS_AT_ONCE = 4


def start(request: EngineRequest) -> int:
    """Raises `UserError` and `LaunchError`."""
    options = RayOptions(**request.settings)
    request.check(request.workers)
    ray = import_ray()
    # Names of actors are looked up in a namespace; one of its own keeps jobs apart.
    namespace = f"farandole-{secrets.token_hex(8)}"
    address = options.ray_address or os.environ.get("RAY_ADDRESS", "auto")
    check_address(address)
    connect(find_cluster(address), namespace)
    try:
        bundle = _bundle(ray, request, options)
        with _placed(ray, request.nodes, bundle) as group:
            actors = _actors(ray, request.nodes, bundle, group, options.cpus or 1)
            try:
                return _run(ray, request, namespace, actors)
            finally:
                for actor in actors.values():
                    ray.kill(actor)
    finally:
        ray.shutdown()


def _bundle(ray: Any, request: EngineRequest, options: RayOptions) -> dict[str, float]:
    """What each node must have."""
    gpus = options.gpus
    if gpus is None:  # one for each worker, if there are as many
        there = ray.cluster_resources().get("GPU", 0)
        gpus = request.per_node if there >= request.workers else 0
    bundle = {"CPU": float((options.cpus or 1) * request.per_node), "GPU": float(gpus)}
    return {kind: count for kind, count in bundle.items() if count}


@contextmanager
def _placed(ray: Any, nodes: int, bundle: Mapping[str, float]) -> Iterator[Any]:
    """The placement group, whose resources are there. Raises `LaunchError` naming what is not."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(bundle)] * nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(_NOTE_SECONDS):
            asked = ", ".join(f"{count:g} {kind}" for kind, count in bundle.items())
            wanted = f"{nodes} nodes with {asked} each"
            tell(f"waiting for {wanted}; the Ray cluster has {described(ray)}")
            if not group.wait(_PLACE_SECONDS):
                raise LaunchError(
                    f"the Ray cluster has not offered {wanted} within {_PLACE_SECONDS:g} s. It has "
                    f"{described(ray)}. Ask for less, or see who uses it: ray status"
                )
        yield group
    finally:
        remove_placement_group(group)


def _actors(
    ray: Any, nodes: int, bundle: Mapping[str, float], group: Any, threads: int
) -> dict[str, Any]:
    """One on each node, by the name under which the bridge finds it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        f"node-{index}": ray.remote(AgentHost)
        .options(
            name=f"node-{index}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=_CALLS_AT_ONCE,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        )
        .remote(threads)
        for index in range(nodes)
    }


def _run(ray: Any, request: EngineRequest, namespace: str, actors: Mapping[str, Any]) -> int:
    # Not only the host's name: several nodes of a cluster may be on one host, and what has a name
    # of this host would be started here, outside of what Ray has set apart.
    hosts = {f"ray-{name}-{actor[5:]}": actor for actor, name in _host_names(ray, actors).items()}
    topology = place_workers(dict.fromkeys(hosts, request.per_node), request.workers)
    tell(f"placed by Ray: {topology}")
    job = replace(request.job(topology), rank0_owns_terminal=False)
    channel = RayActors(ray.get_runtime_context().gcs_address, namespace, hosts)
    nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    address = address_for(nodes, request.interfaces)

    def launch(job: Job) -> Outcome:
        return launch_on_hosts(job, topology, channel, request.interfaces, address=address)

    outcome = launch_with_restarts(lambda job, _: launch(job), job, topology, request.restarts)
    print_outcome(outcome, topology.size, topology=topology)
    return outcome.exit_code


def _host_names(ray: Any, actors: Mapping[str, Any]) -> dict[str, str]:
    """Of the hosts that the actors are on. Raises `LaunchError` where they do not start."""
    try:
        asked = [actor.host_name.remote() for actor in actors.values()]
        return dict(zip(actors, ray.get(asked, timeout=_ACTOR_SECONDS), strict=True))
    except ray.exceptions.RayError as error:
        raise LaunchError(
            f"the actors on the nodes do not start: {str(error).strip().splitlines()[-1]} Is the "
            "same Python with Farandole on all nodes of the Ray cluster?"
        ) from error
