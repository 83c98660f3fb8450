"""From the options of `farandole run --on ENGINE` to an engine that has done its part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from farandole.cli.elastic_options import is_elastic
from farandole.cli.engine_options import ChosenEngine
from farandole.cli.job.restarting import announce_restarting
from farandole.cli.job.run import check, check_scheme, job_of, variables_of
from farandole.cli.job.run_options import RunOptions
from farandole.cli.job.trace_file import merge_trace
from farandole.errors import UserError
from farandole.launch.engines.catalog import KUBERNETES, MPI
from farandole.launch.engines.request import EngineRequest
from farandole.launch.placement.placement import Placement, place

# What reaches workers by variables, whoever starts them. Any other option, also one that is new,
# is refused where the launcher is not ours: see `ChosenEngine.check_options`.
_BY_VARIABLES = (
    *("layout", "sync", "name", "runs", "fallback", "seed", "transport", "pretend_hosts"),
    "choose",
    *("no_check_finite", "trace", "servers", "key_file", "module", "script", "arguments"),
)
_HOSTS = ("hosts", "hostfile", "ssh_port", "ssh_identity_file")
_ALLOWED = {
    MPI: (*_BY_VARIABLES, *_HOSTS, "network_interfaces", "workers"),
    KUBERNETES: (*_BY_VARIABLES, "grace", "restarts"),
}


def run_on_engine(chosen: ChosenEngine, options: RunOptions) -> int:
    """The exit code of the command. Raises `UserError` for what the engine cannot do."""
    engine = chosen.engine
    if options.per_gpu is not None:
        raise UserError(
            f"--per-gpu {options.per_gpu} under --on {chosen.name}: MPS daemons are started by the "
            "launcher of one host. Start `farandole run --per-gpu …` on the host with the GPUs, "
            "such as in an interactive allocation of one node."
        )
    check(options, script_here=engine.has_script, mpi=chosen.name == MPI)
    nodes, per_node = chosen.counts(options.workers)
    if not engine.is_own_launcher:
        chosen.check_options(_ALLOWED[chosen.name])
        _check_servers(chosen.name, options)
    else:
        chosen.refuse(_HOSTS, "knows its own hosts")
        if is_elastic(options) and options.servers is None:
            why = f"workers that {chosen.name} places do not come and go one by one"
            announce_restarting(options, why)
    if not engine.has_script:  # nor is this host's folder the one that the workers are in
        options = replace(options, trace=chosen.as_given("trace"))
    request = EngineRequest(
        nodes=nodes,
        per_node=per_node,
        script=options.script,
        command=(*(["-m"] if options.module else []), options.script, *options.arguments),
        words=("run", *chosen.words(without=("name", "outcome_file"))),
        name=options.name,
        runs=options.runs or Path("runs"),
        grace_seconds=options.grace,
        restarts=options.restarts,
        settings=chosen.settings,
        interfaces=options.where.interfaces,
        is_counted=chosen.is_counted,
        check=lambda workers: check_scheme(options, workers),
        variables=lambda workers: variables_of(options, workers),
        job=lambda topology: job_of(options, topology),
        placement=lambda: (
            place(options.where, options.workers) or Placement.here(options.workers or per_node)
        ),
    )
    try:
        return engine.start(request)
    finally:
        if engine.is_own_launcher and options.trace is not None:
            merge_trace(options.trace)


def _check_servers(engine: str, options: RunOptions) -> None:
    if options.servers is None:
        return
    if not options.servers.startswith("tcp://") or options.key_file is None:
        raise UserError(
            f"--servers {options.servers} under --on {engine}: start the servers with "
            "`farandole server`, and give --servers tcp://HOST:PORT --key-file FILE."
        )
