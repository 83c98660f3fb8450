"""`farandole run`: starts a script on workers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from farandole import environment
from farandole.cli.elastic_options import elastic_options
from farandole.cli.engine_options import ChosenEngine, engine_options
from farandole.cli.host_options import host_options
from farandole.cli.options import (
    PASS_ON,
    checkpoint_option,
    choose_option,
    grace_option,
    layout_option,
    link_option,
    pretend_hosts_option,
    seed_option,
    stall_option,
    sync_option,
)
from farandole.cli.sections import SectionedCommand
from farandole.launch.outcome_file import write_outcome
from farandole.launch.outcome_text import print_outcome

SECTIONS = {
    "Workers": ("--workers", "--per-gpu", "--gpu-threads", "-m", "--horovod", "--no-fork"),
    "Training": (
        *("--sync", "--layout", "--seed", "--choose", "--transport", "--pretend-hosts", "--link"),
        "--no-check-finite",
    ),
    "Files": ("--name", "--runs", "--checkpoint", "--fallback", "--trace"),
    "Other hosts": (
        *("--hosts", "--hostfile", "--ssh-port", "--ssh-identity-file", "--network-interfaces"),
    ),
    "Failures and time limits": (
        *(
            "--min",
            "--max",
            "--restarts",
            "--replace-stragglers",
            "--elastic-wait",
            "--host-silence",
        ),
        *("--stall", "--stall-kill", "--exit-timeout", "--grace"),
    ),
    "Parameter servers": ("--servers", "--replicas", "--functions", "--key-file"),
    "Schedulers and clusters": (
        *("--on", "--nodes", "--per-node", "--cpus", "--gpus", "--dry-run", "--output"),
        *("--partition", "--time", "--account", "--slurm-option", "--ray-address", "--image"),
        *("--kind", "--namespace", "--memory", "--shm", "--volume", "--token-secret"),
    ),
}

# A trial leaves no traces: neither in the user's folders, nor for a later start of the job.
_NOT_IN_TRIALS = (
    *("per_gpu", "name", "runs", "checkpoint", "fallback", "trace", "restarts"),
    "outcome_file",
)


@click.command(context_settings=PASS_ON, cls=SectionedCommand, sections=SECTIONS)
@click.option(
    "-n",
    "--workers",
    type=int,
    help="Number of workers. [all slots of the hosts; on this host one per GPU, or 1]",
)
@click.option(
    "--per-gpu",
    metavar="K|auto",
    help="Number of workers that share each GPU of this host, under an MPS daemon that the job "
    "starts and ends: small batches leave a GPU idle, and several workers fill it. auto tries 1, "
    "2, 4 and 8 with the beginning of the script, and takes the fastest. [one worker a GPU]",
)
@click.option(
    "--gpu-threads",
    type=float,
    metavar="PERCENT",
    help="With --per-gpu: the most of a GPU's threads that one worker may use at a time. Less than "
    "100 keeps workers out of each other's way, and leaves threads idle when the others pause. "
    "[100]",
)
@engine_options()
@host_options
@layout_option()
@sync_option()
@click.option("--name", help="Name of the run's folder in --runs. [<script>-<time>]")
@click.option("--runs", type=click.Path(path_type=Path), help="Folder of all runs. [runs]")
@checkpoint_option()
@click.option(
    "--fallback",
    is_flag=True,
    help="If the newest checkpoint is damaged or not finite, resume from the newest good one.",
)
@seed_option()
@choose_option()
@click.option(
    "--transport",
    metavar="NAME",
    help="Transport that carries the bytes: auto, shm (shared memory) or c10d (gloo, NCCL). [auto]",
)
@pretend_hosts_option()
@link_option()
@click.option(
    "--no-check-finite",
    is_flag=True,
    help="Do not stop when a gradient or a parameter is NaN or infinite.",
)
@click.option(
    "--trace",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    envvar=environment.TRACE,
    help="Write a timeline of all ranks to this file. Open it at https://ui.perfetto.dev.",
)
@click.option(
    "--servers",
    metavar="N|tcp://HOST:PORT",
    help="Number of parameter servers to start for the job, or the address of running ones. "
    "[1 if the strategy needs servers]",
)
@click.option(
    "--replicas",
    type=int,
    metavar="K",
    help="Number of extra copies of each range of parameters, on other servers. As many servers "
    "may fail as there are extra copies. [1 with several servers, else 0]",
)
@click.option(
    "--functions",
    metavar="MODULE",
    multiple=True,
    help="Module with functions that the servers may run. Repeat it for several modules.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File with the key of running servers. `farandole server` prints its name.",
)
@elastic_options
@click.option(
    "--exit-timeout",
    type=float,
    metavar="SECONDS",
    help="How long the other workers may run after the first one has finished, in seconds. "
    "[15 minutes without CPU time, a day in any case]",
)
@stall_option()
@click.option(
    "--stall-kill",
    is_flag=True,
    help="With --stall: also kill a stalled worker, unless it waits for another one.",
)
@grace_option()
@click.option(
    "--horovod",
    is_flag=True,
    help="Run a script that was written for Horovod: in the workers, `import horovod` imports "
    "Farandole's.",
)
@click.option(
    "--no-fork",
    is_flag=True,
    help="Start every worker as a fresh process. Otherwise 3 or more workers are forked from a "
    "process that has imported torch.",
)
@click.option("--outcome-file", hidden=True, type=click.Path(path_type=Path))  # for `race`
@click.option("-m", "module", is_flag=True, help="Run SCRIPT as a module, as `python -m` does.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(outcome_file: Path | None, horovod: bool, trace: Path | None, **options: Any) -> None:
    """Start SCRIPT on workers, on this host or on several. Each worker is a process.

    In the script, `fd.init()` joins the workers. Every line of output starts with the rank of its
    worker. If a worker fails, the others are stopped and its traceback is shown last. With
    parameter servers, any worker except rank 0 may fail, and the rest go on. With --min or
    --restarts any worker may fail, and the rest finish its step and go on, or all start again
    from the last checkpoint.

    \b
      farandole run -n 4 train.py --epochs 10
      farandole run -n 4 --sync local:every=8 train.py
      farandole run -n 4 --layout stages=4,microbatches=8 train.py
      farandole run -H node1:4,node2:4 --sync daso train.py
      farandole run -n 4 --pretend-hosts 2 --sync daso train.py
      farandole run -n 4 --pretend-hosts 2 --link 200mbit,1ms --sync daso train.py
      farandole run -n 4 --name digits --checkpoint every=10min,keep=3,best=accuracy train.py
      farandole run -n 4 --trace out.json train.py
      farandole run -n 4 --sync server --servers 3 --restarts 1 train.py
      farandole run -n 8 --min 4 --restarts 10 train.py
      farandole run -n 4 --layout stages=2 --restarts 10 --checkpoint every=1min train.py
      farandole run --hostfile hosts --min 4 --max 16 --restarts 10 train.py
      farandole run --per-gpu 4 train.py
      farandole run --per-gpu auto train.py
      farandole run -n 4 --horovod train_with_horovod.py
      farandole run --on slurm --nodes 4 --per-node 8 train.py
    """
    from farandole.cli.job.run import check, run_job
    from farandole.cli.job.run_options import RunOptions

    engine = ChosenEngine(click.get_current_context(), options)
    chosen = RunOptions(horovod=horovod, trace=trace.absolute() if trace else None, **options)
    if not engine.is_started_here:
        from farandole.cli.job.on_engine import run_on_engine

        sys.exit(run_on_engine(engine, chosen))
    engine.check_hosts(chosen.where)
    check(chosen)
    if chosen.per_gpu == "auto":
        from farandole.cli.job.per_gpu import choose_per_gpu

        words = engine.words(without=_NOT_IN_TRIALS)
        chosen = replace(chosen, per_gpu=str(choose_per_gpu(chosen, words)))
    outcome, topology = run_job(chosen)
    print_outcome(outcome, topology.size, topology=topology)
    if outcome_file is not None:
        write_outcome(outcome_file, outcome)
    sys.exit(outcome.exit_code)
