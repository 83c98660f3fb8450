"""A study from its first check to its results."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import time
from pathlib import Path

import click
import torch
from rich.console import Console

import farandole
from farandole.errors import FarandoleError, UserError
from farandole.launch.nested_runs import WarmProcesses
from farandole.launch.placement.placement import Placement, place
from farandole.train.claim import claim
from farandole.train.settings import default_name
from farandole.tune import owner
from farandole.tune.ensemble import build_ensemble
from farandole.tune.hosts import pack, slots_on
from farandole.tune.options import TuneOptions
from farandole.tune.page.page import write_page
from farandole.tune.population.training import Population
from farandole.tune.preloading import modules_of
from farandole.tune.recording import Recording
from farandole.tune.results import show
from farandole.tune.schemes import check_schemes
from farandole.tune.slots import Slots, slots_here
from farandole.tune.study import Study
from farandole.tune.tuner import Tuner
from farandole.worker.signals import Stopped, exit_code_of, signals_raised

FILE_NAME = "study.journal"


def run_tune(options: TuneOptions, warm: WarmProcesses) -> int:
    """Runs the trials that are missing, shows the results, and returns the exit code.

    Raises `UserError` before the first trial starts, and where none could do what was asked for.
    """
    check_schemes(options)
    placement = _placement(options)
    path, folder = _places(options)
    slots = _slots(options, placement, folder)
    study = Study(
        path,
        options.identity(),
        sampler=options.sampler,
        pruner=options.pruner,
        seed=options.seed,
    )
    _tell_of_before(study, options)
    recording = Recording(folder, study, options, _facts(slots))
    recording.write()
    click.echo(f"to watch: farandole watch {shlex.quote(str(folder))}")
    stopped_by = None
    with signals_raised():
        try:
            _prepare(warm, slots, options.command[0])
            kind = Tuner if options.populations is None else Population
            kind(options, study, folder, slots, warm, recording.write).run()
        except KeyboardInterrupt as stop:
            stopped_by = stop.name if isinstance(stop, Stopped) else "SIGINT"
        finally:
            warm.close()
            recording.write()  # those that were stopped are no longer running
    show(study, options, Console())
    ensemble = None
    if options.ensemble is not None and stopped_by is None and study.ranked():
        ensemble = build_ensemble(study.ranked(), options.ensemble, folder)
        click.echo(ensemble)
    if study.trials():
        click.echo(f"page: {write_page(folder, study, options, recording.facts, ensemble)}")
    click.echo(f"study: {path}")
    if stopped_by is not None:
        words = ["--storage", str(path), *options.command]
        click.echo(f"to go on, give the same options and: {shlex.join(words)}")
        return exit_code_of(stopped_by)
    return 0 if study.ranked() else 1


def _places(options: TuneOptions) -> tuple[Path, Path]:
    """The file of the study, and the folder of its trials."""
    if options.storage is None:
        made = claim(options.runs, f"tune-{default_name(options.command[0])}")
        folder = made.parent / made.name
        return folder / FILE_NAME, folder
    path = options.storage
    if path.is_dir():
        raise UserError(f"--storage {path} is a folder: give a file, such as {path / FILE_NAME}.")
    if path.name == FILE_NAME:
        return path, path.parent
    return path, path.with_name(f"{path.name}-trials")


def _placement(options: TuneOptions) -> Placement | None:
    """None: nothing describes any hosts. Refuses those that are too small for a trial."""
    placement = place(options.where, None)
    if placement is not None:
        pack({name: entry.slots for name, entry in placement.entries.items()}, options.workers)
    return placement


def _slots(options: TuneOptions, placement: Placement | None, folder: Path) -> Slots:
    if placement is None:
        return slots_here(options.workers, options.parallel, torch.cuda.device_count())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return slots_on(placement, options, folder)
    except FarandoleError:
        with contextlib.suppress(OSError):  # an old study is in it
            folder.rmdir()
        raise


def _tell_of_before(study: Study, options: TuneOptions) -> None:
    lost = study.repeat_lost(owner.is_lost)
    if lost:
        click.echo(f"trials whose process is gone are repeated: {', '.join(map(str, lost))}")
    known = len(study.trials())
    if known:
        of = f" of {options.trials}" if options.trials is not None else ""
        click.echo(f"the study has {known}{of} trials already")


def _facts(slots: Slots) -> dict[str, str]:
    return {
        "command": shlex.join(["farandole", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "at once": str(slots),
        "farandole": farandole.__version__,
    }


def _prepare(warm: WarmProcesses, slots: Slots, script: str) -> None:
    begin = time.perf_counter()
    if warm.prepare({slots.workers_here}, alone=slots.alone, modules=modules_of(Path(script))):
        click.echo(f"torch is imported once for all trials: {time.perf_counter() - begin:.1f} s")
    click.echo(slots)
