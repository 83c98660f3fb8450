"""From the options of `farandole run` to an elastic job that has ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from farandole.cli.elastic_options import ElasticOptions
from farandole.cli.job.restarting import run_restarting, why_all_restart
from farandole.errors import UserError

if TYPE_CHECKING:
    from farandole.launch.job import Job, Outcome
    from farandole.launch.placement.placement import HostOptions, Placement
    from farandole.layout import Layout
    from farandole.sync import Strategy
    from farandole.topology import Topology


class Options(ElasticOptions, Protocol):
    """Of all options those that matter here."""

    @property
    def trace(self) -> Path | None: ...
    @property
    def pretend_hosts(self) -> str | None: ...
    @property
    def checkpoint(self) -> str | None: ...
    @property
    def per_gpu(self) -> str | None: ...
    @property
    def horovod(self) -> bool: ...
    @property
    def where(self) -> HostOptions: ...
    @property
    def module(self) -> bool: ...
    @property
    def script(self) -> str: ...


def run_elastic(
    options: Options,
    job: Job,
    placement: Placement,
    strategy: Strategy | None,
    layout: Layout | None,
    launch: Callable[[Job, frozenset[str]], Outcome],
) -> tuple[Outcome, Topology]:
    """Runs `job` on workers that come and go. Returns how it ended, and where its workers were.

    They change ranks and hosts: the topology has one host then, and where a worker was that failed,
    a line has told. A job that cannot go on without a lost worker is run by `launch`, and started
    again as a whole, perhaps without hosts that are lost.
    """
    _check(options, job.workers)
    why = why_all_restart(options, strategy, layout)
    if why is None:
        outcome = _run_in_memory(options, job, placement)
        if not (options.restarts and outcome.failure and outcome.failure.is_not_elastic):
            from farandole.topology import Topology

            return outcome, Topology.single(job.workers)
        why = "the script does what its error says, above"
    ended = run_restarting(options, job, placement, layout, why, launch)
    return ended, placement.topology


def _run_in_memory(options: Options, job: Job, placement: Placement) -> Outcome:
    from farandole.launch.hosts import HERE
    from farandole.launch.policies.elastic.job import ElasticJob, TrainingLimits

    most = options.max_workers or job.workers
    elastic = ElasticJob(
        job.command,
        min_workers=1 if options.min_workers is None else options.min_workers,
        max_workers=most,
        discover=lambda: {HERE: most},
        workers=job.workers,
        start_timeout_seconds=options.elastic_wait,
        answer_seconds=options.elastic_wait,
        training=TrainingLimits(job, options.restarts, options.replace_stragglers),
        silence_seconds=options.host_silence,
    )
    if not placement.entries:
        from farandole.launch.launcher import launch_elastic

        return launch_elastic(elastic)
    from farandole.launch.probes.elastic_launch import launch_elastic_placed

    script = None if options.module else options.script
    return launch_elastic_placed(elastic, placement, options.where, script=script)


def _check(options: Options, workers: int) -> None:
    """Raises `UserError` for what no such job can do, before anything is started."""
    least, most = options.min_workers, options.max_workers
    if least is not None and least < 1:
        raise UserError(f"--min {least}: a job needs at least 1 worker.")
    if least is not None and least > workers:
        raise UserError(
            f"--min {least}: the job begins with {workers}, and would wait for ever. Give --min "
            f"{workers} or less, or begin with more: -n {least}, and slots for them in -H."
        )
    if most is not None and most < workers:
        raise UserError(
            f"--max {most}: the job begins with {workers}. Give --max {workers} or more, or begin "
            f"with fewer: -n {max(most, 1)}"
        )
    if options.restarts < 0:
        raise UserError(f"--restarts {options.restarts}: give 0 or more.")
    if options.replace_stragglers and not options.restarts:
        raise UserError("--replace-stragglers: say with --restarts how many may be replaced.")
    if not options.elastic_wait > 0:
        raise UserError(f"--elastic-wait {options.elastic_wait:g}: give seconds above 0.")
    if not options.host_silence > 0:
        raise UserError(f"--host-silence {options.host_silence:g}: give seconds above 0.")
    if options.trace is not None:
        raise UserError(
            "--trace is not there for jobs whose workers come and go. Leave it out, or leave out "
            "--min and --restarts: then a lost worker ends the job."
        )
    if options.horovod:
        raise UserError(
            "--min and --restarts are for scripts that call fd.init(). For one that calls "
            "hvd.init() use `farandole horovodrun --min-np …`."
        )
