"""Trials on several hosts: which of them run where.

    -n 2 -H a:4,b:2       a: two trials      b: one trial
    -n 6 -H a:4,b:4       one trial: four of its workers on a, two on b

A trial stays within a host where its workers fit into one, so that all trials are alike. Where they
fit into none, each trial gets hosts of its own. Trials ask and log through files, so all hosts
must share the folder of the study.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farandole.errors import LaunchError, UserError
from farandole.files import write_whole
from farandole.launch.backends.slurm.channel import Srun
from farandole.launch.host_facts import HostFacts, JobFiles, facts_of_this_host
from farandole.launch.hosts import HERE
from farandole.launch.placement.host_file import HostEntry
from farandole.launch.placement.placement import HostOptions, Placement
from farandole.launch.probes.crowding import crowding
from farandole.launch.probes.host_check import marker
from farandole.launch.probes.problems import require, tell_warnings
from farandole.launch.probes.survey import sessions, survey
from farandole.tune.options import TuneOptions
from farandole.tune.slots import Share, Slots, gpus_of, visible


@dataclass(frozen=True)
class TrialPlace:
    """The hosts of a trial, with the number of its workers on each. `first`: of the first host's
    workers, which others may share with it."""

    workers: Mapping[str, int]
    first: int = 0


def pack(slots: Mapping[str, int], workers: int) -> list[TrialPlace]:
    """As many trials of `workers` workers as the hosts have room for.

    Raises `UserError` where not one fits.
    """
    inside = [
        TrialPlace({host: workers}, at * workers)
        for host, count in slots.items()
        for at in range(count // workers)
    ]
    if inside:
        return inside
    across: list[TrialPlace] = []
    taken: dict[str, int] = {}
    for host, count in slots.items():
        taken[host] = min(count, workers - sum(taken.values()))
        if sum(taken.values()) == workers:
            across.append(TrialPlace(taken))
            taken = {}
    if not across:
        listed = ", ".join(f"{host}:{count}" for host, count in slots.items())
        raise UserError(
            f"-n {workers}: a trial has {workers} workers, and the hosts have room for "
            f"{sum(slots.values())} ({listed}). Give them more slots, or trials fewer workers."
        )
    return across


def slots_on(placement: Placement, options: TuneOptions, folder: Path) -> Slots:
    """Raises `UserError` or `LaunchError`, naming the host, where trials cannot run there.

    `folder` is that of the study.
    """
    workers, parallel = options.workers, options.parallel
    counts = {name: entry.slots for name, entry in placement.entries.items()}
    parts = pack(counts, workers)
    if parallel is not None and parallel > len(parts):
        raise UserError(
            f"--parallel {parallel}: with -n {workers} the hosts have room for {len(parts)} at a "
            "time. Give them more slots, or leave --parallel out."
        )
    parts = parts[:parallel]
    at_once = {name: sum(part.workers.get(name, 0) for part in parts) for name in placement.entries}
    facts = _ask(placement, at_once, JobFiles(str(Path.cwd()), options.command[0]), folder)
    cores = {name: found.cores // max(1, at_once.get(name, 0)) for name, found in facts.items()}
    shares = []
    for number, part in enumerate(parts):
        threads = max(1, min(cores[name] for name in part.workers))
        variables = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}
        if len(part.workers) == 1:
            ((host, count),) = part.workers.items()
            variables |= gpus_of(part.first, count, visible(facts[host].gpus))
        entries = [
            HostEntry(known.name, count, known.port, known.user)
            for name, count in part.workers.items()
            for known in (placement.entries[name],)
        ]
        is_here = set(part.workers) == {HERE}
        if isinstance(placement.channel, Srun):
            variables |= _slurm(entries)
            words: list[str] = []
        else:
            words = _hosts(entries, folder / f".hosts-{number}.toml")
            words += [] if is_here else _reach(options.where)
        said = "+".join(f"{name}:{count}" for name, count in part.workers.items())
        shares.append(Share(part.workers.get(HERE, 0), variables, tuple(words), said))
    return Slots(workers, shares, alone=not placement.others)


def _ask(
    placement: Placement, at_once: Mapping[str, int], files: JobFiles, folder: Path
) -> dict[str, HostFacts]:
    """What each host is that has workers. All must see the folder of the study."""
    others = [name for name, count in at_once.items() if count and name != HERE]
    facts = {HERE: facts_of_this_host(files)}
    placement.tell_note()
    problems = crowding(HERE, at_once.get(HERE, 0), facts[HERE].cores, facts[HERE].gpus)
    if others:
        with (
            marker(folder) as seen,
            sessions(others, placement.channel) as probes,
        ):
            shared = replace(files, shared=(seen,))
            reports = survey(probes, shared, placement.channel, placement.interfaces)
        for report in reports:
            problems += report.problems
            if report.facts is not None:
                facts[report.host] = report.facts
                problems += crowding(
                    report.host, at_once[report.host], report.facts.cores, report.facts.gpus
                )
    tell_warnings(problems)
    try:
        require(problems)
    except LaunchError as error:
        raise LaunchError(
            f"{error}\nAll hosts must share {folder} (--runs, --storage): trials write there what "
            "they ask and log."
        ) from error
    return facts


def _slurm(entries: Sequence[HostEntry]) -> dict[str, str]:
    """`farandole run` reads the nodes of an allocation here; srun itself knows it by its job."""
    return {
        "SLURM_JOB_NODELIST": ",".join(entry.name for entry in entries),
        "SLURM_TASKS_PER_NODE": ",".join(str(entry.slots) for entry in entries),
    }


def _hosts(entries: Sequence[HostEntry], path: Path) -> list[str]:
    if all(entry.port is None and entry.user is None for entry in entries):
        return ["-H", ",".join(f"{entry.name}:{entry.slots}" for entry in entries)]
    lines = []
    for entry in entries:
        lines += ["[[host]]", f'name = "{entry.name}"', f"slots = {entry.slots}"]
        lines += [] if entry.port is None else [f"port = {entry.port}"]
        lines += [] if entry.user is None else [f'user = "{entry.user}"']
    write_whole(path, "\n".join([*lines, ""]).encode())
    return ["--hostfile", str(path)]


def _reach(where: HostOptions) -> list[str]:
    """The options of ssh and of the network."""
    words = HostOptions(
        ssh_port=where.ssh_port,
        ssh_identity_file=where.ssh_identity_file,
        network_interfaces=where.network_interfaces,
    )
    return words.words()
