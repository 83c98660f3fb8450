"""`farandole run --horovod`: what does not go with it, and what its workers are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from farandole.errors import UserError

if TYPE_CHECKING:
    from farandole.launch.job import Job
    from farandole.topology import Topology


class Options(Protocol):
    """Those that are looked up by name are not listed."""

    @property
    def stall(self) -> float | None: ...


def refuse_settings_of_our_own(options: Options) -> None:
    """Raises `UserError` for options that only `fd.init` reads."""
    ours = ("sync", "layout", "servers", "name", "runs", "checkpoint", "fallback", "seed", "link")
    for name in (*ours, "choose"):
        if getattr(options, name) not in (None, False, ()):
            raise UserError(
                f"--{name} is for scripts that call fd.init(); with --horovod the script calls "
                f"hvd.init(), which knows no such thing. Leave out --{name} or --horovod."
            )
    if options.stall is not None:
        raise UserError(
            "--stall watches scripts that call fd.init(). With --horovod set "
            "HOROVOD_STALL_CHECK_TIME_SECONDS, which names the ranks that are missing."
        )


def with_horovod(job: Job, topology: Topology, trace: Path | None) -> Job:
    """Where `import horovod` is ours, and each worker also gets its rank in Horovod's variables."""
    from farandole.horovod.aliases import shim_variables
    from farandole.launch.rank_variables import horovod_rank_variables

    timeline = {"HOROVOD_TIMELINE": str(trace)} if trace is not None else {}
    return replace(
        job,
        environment={**job.environment, **shim_variables(), **timeline},
        per_rank=[horovod_rank_variables(topology, rank) for rank in range(job.workers)],
    )
