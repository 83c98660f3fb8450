"""`farandole doctor`: reports what works on this machine, and what to install."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import click

from farandole.cli.host_options import host_options
from farandole.cli.options import check_script
from farandole.errors import UserError
from farandole.launch.placement.placement import HostOptions, Placement, place


@click.command()
@host_options
@click.option(
    "--script",
    metavar="FILE",
    help="With -H: also check that this script is the same on all hosts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool, script: str | None, where: HostOptions) -> None:
    """Check what works on this machine, and say how to install what is missing.

    The command checks Python, torch and its backends, CPUs, GPUs, memory, limits, MPI, Slurm and
    the compiler. Then two workers run a real all-reduce and measure the cost of a message between
    them. The exit code is 1 if something that Farandole needs is broken, and 0 otherwise.

    With -H or --hostfile, or in a job of Slurm, PBS or LSF, it checks the hosts instead: whether
    ssh reaches them, versions, clocks, cores and GPUs, and the link between every two of them.

    \b
      farandole doctor
      farandole doctor -H node1:4,node2:4 --script train.py
    """
    placement = place(where, None)
    if placement is not None:
        _examine_hosts(placement, script, as_json)
    if script is not None:
        raise UserError(f"--script {script} is for several hosts: name them with -H.")
    from farandole.doctor import show
    from farandole.doctor.checks import is_broken
    from farandole.doctor.examine import examine

    findings = examine()
    if as_json:
        found = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"ok": not is_broken(findings), "findings": found}, indent=2))
    else:
        # rich itself may be what is missing.
        if sys.stdout.isatty() and find_spec("rich") is not None:
            show.print_table(findings)
        else:
            click.echo("\n".join(show.plain_lines(findings)))
        click.echo(f"\n{show.verdict(findings)}")
    sys.exit(1 if is_broken(findings) else 0)


def _examine_hosts(placement: Placement, script: str | None, as_json: bool) -> None:
    from farandole.doctor.hosts import examine_hosts
    from farandole.launch.host_facts import JobFiles

    if script is not None:
        check_script(script)
    placement.tell_note()
    found = examine_hosts(placement, JobFiles(str(Path.cwd()), script))
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        from farandole.doctor.show_hosts import print_hosts

        print_hosts(found)
    sys.exit(1 if found.is_broken else 0)
