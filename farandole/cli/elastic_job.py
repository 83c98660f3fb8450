"""From the options of `farandole run` to an elastic job that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from farandole.cli.elastic_options import ElasticOptions
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
) -> tuple[Outcome, Topology]:
    """Runs `job` on workers that come and go. Returns how it ended.

    They change ranks and hosts: the topology has one host, and where a worker was that failed, a
    line has told.
    """
    _check(options, job.workers, strategy, layout)
    from farandole.launch.hosts import HERE
    from farandole.launch.policies.elastic.job import ElasticJob, TrainingLimits
    from farandole.topology import Topology

    everywhere = Topology.single(job.workers)
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

        return launch_elastic(elastic), everywhere
    from farandole.launch.probes.elastic_launch import launch_elastic_placed

    script = None if options.module else options.script
    return launch_elastic_placed(elastic, placement, options.where, script=script), everywhere


def _check(
    options: Options, workers: int, strategy: Strategy | None, layout: Layout | None
) -> None:
    """Raises `UserError` for what such jobs cannot do, before anything is started."""
    least = 1 if options.min_workers is None else options.min_workers
    most = options.max_workers or workers
    if least < 1:
        raise UserError(f"--min {least}: a job needs at least 1 worker.")
    if not least <= workers <= most:
        raise UserError(
            f"-n {workers} must be between --min {least} and --max {most}: it is the number of "
            "workers that the job begins with."
        )
    if options.restarts < 0:
        raise UserError(f"--restarts {options.restarts}: give 0 or more.")
    if options.replace_stragglers and not options.restarts:
        raise UserError("--replace-stragglers: say with --restarts how many may be replaced.")
    if not options.elastic_wait > 0:
        raise UserError(f"--elastic-wait {options.elastic_wait:g}: give seconds above 0.")
    if not options.host_silence > 0:
        raise UserError(f"--host-silence {options.host_silence:g}: give seconds above 0.")
    why = None if strategy is None else strategy.why_not_elastic
    if why is not None:
        raise UserError(
            f"--sync {strategy} is not there for jobs whose workers come and go: {why}. Take "
            "--sync allreduce, or leave out --min and --restarts."
        )
    _refuse_others(options, layout)


def _refuse_others(options: Options, layout: Layout | None) -> None:
    refused = {
        "--layout": layout is not None and layout.ranks != 1,
        "--trace": options.trace is not None,
        "--pretend-hosts": options.pretend_hosts is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            raise UserError(
                f"{name} is not there for jobs whose workers come and go. Leave it out, or leave "
                "out --min and --restarts: then a lost worker ends the job."
            )
    if options.horovod:
        raise UserError(
            "--min and --restarts are for scripts that call fd.init(). For one that calls "
            "hvd.init() use `farandole horovodrun --min-np …`."
        )
