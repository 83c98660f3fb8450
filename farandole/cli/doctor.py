"""`farandole doctor`: reports what works on this machine, and what to install."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Check what works on this machine, and say how to install what is missing.

    The command checks Python, torch and its backends, CPUs, GPUs, memory, limits, MPI, Slurm and
    the compiler. Then two workers run a real all-reduce and measure the cost of a message between
    them. The exit code is 1 if something that Farandole needs is broken, and 0 otherwise.
    """
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
