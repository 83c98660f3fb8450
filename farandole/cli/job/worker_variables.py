"""The environment variables that tell workers what was asked for on the command line."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from farandole import environment
from farandole.cli.job.scheme import checked_transport, layout_text

if TYPE_CHECKING:
    from farandole.cli.job.run_options import RunOptions
    from farandole.layout import Layout
    from farandole.sync import Strategy


def worker_variables(
    options: RunOptions, strategy: Strategy | None, layout: Layout | None
) -> dict[str, str]:
    """What tells the workers what was asked for."""
    asked = {
        environment.SYNC: str(strategy) if strategy is not None else None,
        environment.LAYOUT: layout_text(layout) if layout is not None else None,
        environment.NAME: options.name,
        environment.RUNS: str(options.runs) if options.runs else None,
        environment.CHECKPOINT: (
            _checked_policy(options.checkpoint) if options.checkpoint is not None else None
        ),
        environment.FALLBACK: "1" if options.fallback else None,
        environment.SEED: str(options.seed) if options.seed is not None else None,
        environment.CHOOSE: shlex.join(options.choose) if options.choose else None,
        environment.SCRIPT: options.script,
        environment.TRANSPORT: (
            checked_transport(options.transport) if options.transport is not None else None
        ),
        environment.CHECK_FINITE: "0" if options.no_check_finite else None,
        environment.PRETEND_HOSTS: options.pretend_hosts,
        environment.SIMULATED_LINK: options.link,
    }
    if options.trace is not None:
        from farandole.trace import merge as tracing

        asked[environment.TRACE_PARTS] = str(tracing.prepare(options.trace))
        asked[environment.TRACE] = ""  # the launcher merges the parts, not the ranks
    return {key: value for key, value in asked.items() if value is not None}


def _checked_policy(text: str) -> str:
    from farandole.train.checkpoint.automatic.policy import parse_checkpoints

    return str(parse_checkpoints(text))
