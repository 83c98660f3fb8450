"""A run's trace, from its first span to the file that Perfetto opens.

`farandole run --trace` names a folder for the ranks' parts and merges them itself, whatever becomes
of the ranks. Under another launcher there is only the name of the trace, in FARANDOLE_TRACE, and
rank 0 merges when it ends.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from farandole.comm import Group
from farandole.errors import FarandoleError, UserError
from farandole.trace.clock import offset_over_group, offset_over_store
from farandole.trace.merge import (
    merge,
    part_file,
    parts_folder,
    prepare,
    remove_parts,
    wait_for_ends,
)
from farandole.trace.recorder import Recorder
from farandole.trace.spans import NO_TRACE
from farandole.train.settings import Settings

_CLOCK_PATIENCE = timedelta(seconds=3)  # at the end, for a rank that may not come any more
_PARTS_PATIENCE_SECONDS = 10.0  # for ranks that end later than rank 0
_FAILED_PATIENCE_SECONDS = 1.0  # the others then wait for rank 0


def start_tracing(settings: Settings, group: Group) -> Tracing | None:
    """All ranks call it. From here on `group.trace` records, if a trace is wanted.

    Raises `UserError` on every rank when it cannot be written.
    """
    if settings.trace_parts is not None:
        return Tracing(group, settings.trace_parts, None)
    if settings.trace is None:
        return None
    target = settings.trace.absolute()
    problem = None
    if group.rank == 0:
        try:
            prepare(target)
        except UserError as error:
            problem = str(error)
    problem = group.broadcast_json(problem)
    if problem is not None:
        raise UserError(problem)
    return Tracing(group, parts_folder(target), target)


class Tracing:
    """One rank's part. `target` is the trace to be merged at the end, if the ranks have to."""

    def __init__(self, group: Group, parts: Path, target: Path | None) -> None:
        self._group = group
        self._pid = os.getpid()
        self._parts = parts
        self._target = target
        offset = offset_over_group(group)
        self._recorder = self._open()
        if offset is not None:
            self._recorder.note(offset.as_line())
        group.trace = self._recorder

    def _open(self) -> Recorder:
        rank = self._group.rank
        host = self._group.topology.host(rank).name
        recorder, problem = None, None
        try:
            self._parts.mkdir(parents=True, exist_ok=True)  # on another host it may not be there
            header = {"rank": rank, "size": self._group.size, "host": host, "pid": os.getpid()}
            recorder = Recorder(part_file(self._parts, rank), header)
        except OSError as error:
            problem = f"rank {rank} on {host} cannot write its part of the trace: {error}"
        for found in self._group.gather_json(problem):
            if found is not None:
                raise UserError(f"{found}. Name a file in a folder that every rank can write to.")
        assert recorder is not None
        return recorder

    def close(self) -> None:
        """At the end of the script. Waits for other ranks only where these must merge the parts,
        and where hosts compare their clocks again; for seconds at most."""
        if os.getpid() != self._pid:
            return  # in a process that the script forked off
        self._group.trace = NO_TRACE
        failed = getattr(sys, "last_value", None) is not None  # by an exception that nobody caught
        if len(self._group.topology.hosts) > 1 and dist.is_initialized() and not failed:
            store = dist.PrefixStore("trace", dist.distributed_c10d._get_default_store())
            offset = offset_over_store(
                store, self._group.rank, self._group.topology, _CLOCK_PATIENCE
            )
            if offset is not None:
                self._recorder.note(offset.as_line())
        self._recorder.close()
        if self._recorder.problem is not None:
            warnings.warn(
                f"rank {self._group.rank}'s part of the trace is not whole: "
                f"{self._recorder.problem}",
                stacklevel=2,
            )
        if self._target is not None and self._group.rank == 0:
            self._merge(self._target, failed)

    def _merge(self, target: Path, failed: bool) -> None:
        patience = _FAILED_PATIENCE_SECONDS if failed else _PARTS_PATIENCE_SECONDS
        wait_for_ends(self._parts, range(self._group.size), patience)
        try:
            merged = merge(target)
        except FarandoleError as error:  # must not hide the error that ended the script
            warnings.warn(str(error), stacklevel=2)
            return
        if merged is None:
            return
        print(f"farandole: {merged}", file=sys.stderr)
        if not merged.missing and not merged.unended:
            remove_parts(target)
            return
        print(
            f"farandole: the parts stay in {self._parts}; when all are there: "
            f"python -m farandole.trace.merge {target}",
            file=sys.stderr,
        )
