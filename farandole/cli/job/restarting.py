"""`farandole run --restarts` for jobs that cannot go on without a lost worker: all start again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from farandole.cli.elastic_options import ElasticOptions
from farandole.errors import UserError

if TYPE_CHECKING:
    from farandole.launch.job import Job, Outcome
    from farandole.launch.placement.placement import Placement
    from farandole.layout import Layout
    from farandole.sync import Strategy


class Options(ElasticOptions, Protocol):
    """Of all options those that matter here."""

    @property
    def pretend_hosts(self) -> str | None: ...
    @property
    def checkpoint(self) -> str | None: ...
    @property
    def per_gpu(self) -> str | None: ...


def why_all_restart(
    options: Options, strategy: Strategy | None, layout: Layout | None
) -> str | None:
    """Why the others cannot go on without a lost worker in this job; None: they can."""
    if layout is not None and (layout.stages == "auto" or layout.ranks != 1):
        return f"layout {layout} spreads a model over several workers"
    why = None if strategy is None else strategy.why_not_elastic
    if why is not None:
        return f"under --sync {strategy} {why}"
    if options.pretend_hosts is not None:
        return f"--pretend-hosts {options.pretend_hosts} says which worker is on which host"
    if options.per_gpu is not None:
        return f"--per-gpu {options.per_gpu} says which worker shares a GPU with which"
    import torch

    if torch.cuda.device_count():
        return "the workers compute on GPUs, and NCCL does not outlive a lost rank"
    return None


def run_restarting(
    options: Options,
    job: Job,
    placement: Placement,
    layout: Layout | None,
    why: str,
    launch: Callable[[Job, frozenset[str]], Outcome],
) -> Outcome:
    """Runs `job` by `launch`, and again when it fails. Returns how its last attempt ended."""
    from farandole.launch.restarting import launch_with_restarts

    ranks = _ranks_of_replica(layout)
    may_shrink = options.min_workers is not None and ranks is not None and bool(placement.others)

    def fewer(lost: frozenset[str]) -> int | None:
        """As many whole replicas as the other hosts have room for."""
        if not may_shrink or ranks is None:
            return None
        workers = min(job.workers, placement.slots_without(lost)) // ranks * ranks
        return workers if workers >= max(options.min_workers or 1, 1) else None

    announce_restarting(options, why, may_shrink=may_shrink)
    return launch_with_restarts(launch, job, placement.topology, options.restarts, fewer)


def _ranks_of_replica(layout: Layout | None) -> int | None:
    """None: it is found out when the job has begun."""
    if layout is None:
        return 1
    return None if layout.stages == "auto" else layout.ranks


def announce_restarting(options: Options, why: str, *, may_shrink: bool = False) -> None:
    """Says what the loss of a worker means. `may_shrink`: fewer go on where a host stays away.

    Raises `UserError` for what only jobs can do that go on without a lost worker.
    """
    from farandole.launch.messages import tell

    _check(options, why)
    said = f"if a worker is lost, all workers start again from the last checkpoint: {why}"
    if options.checkpoint is None:
        said += ". Without --checkpoint, only a script that saves and loads by itself has one"
    if may_shrink:
        said += f", on the hosts that answer then, if they take {options.min_workers} workers"
    elif options.min_workers is not None:
        said += f". --min {options.min_workers} changes nothing"
    tell(said)


def _check(options: Options, why: str) -> None:
    refused = {
        "--max": options.max_workers is not None,
        "--replace-stragglers": options.replace_stragglers,
    }
    for name, is_given in refused.items():
        if is_given:
            raise UserError(
                f"{name} is for jobs whose workers come and go one by one. In this job all start "
                f"again when one is lost: {why}. Leave {name} out."
            )
    if not options.restarts:
        raise UserError(
            f"--min {options.min_workers}: this job cannot go on with fewer workers: {why}. Say "
            "with --restarts R how often all may start again from the last checkpoint."
        )
