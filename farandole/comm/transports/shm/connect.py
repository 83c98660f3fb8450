"""How the ranks of a host come to share one segment: rank 0 makes it, the others open it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from farandole.comm.transports.base import Transport
from farandole.comm.transports.shm.layout import SegmentLayout, make
from farandole.comm.transports.shm.segment import Segment


@dataclass(frozen=True)
class SharedSegment:
    segment: Segment
    layout: SegmentLayout
    pids: tuple[int, ...]  # of all ranks


def share_segment(via: Transport, *, messages_only: bool = False) -> SharedSegment:
    """A segment for the ranks of `via`. Raises `OSError` on all of them, or on none.

    All ranks call `share` the same number of times, whatever fails: none may be left waiting in a
    collective that another one has skipped.
    """
    pids = tuple(int(pid) for pid in via.share(str(os.getpid())))
    layout = SegmentLayout.for_messages(via.size) if messages_only else SegmentLayout(via.size)
    segment, offer, failure = None, "", ""
    try:
        if via.rank == 0:
            segment, token = make(layout, via.timeout)
            offer = json.dumps([segment.descriptor, token])
    except (OSError, AttributeError) as error:
        failure = f"cannot make shared memory: {error}"
    offered = via.share(offer)[0]
    try:
        if via.rank != 0 and offered:
            descriptor, token = json.loads(offered)
            segment = Segment.open(pids[0], descriptor, layout.length)
            # In another pid namespace the same number is another process, with other files.
            if segment.bytes[layout.token : layout.statements].numpy().tobytes().hex() != token:
                failure = f"process {pids[0]} is another one here: not the same /proc"
    except OSError as error:
        failure = f"cannot open the shared memory of process {pids[0]}: {error}"
    failures = via.share(failure)
    if via.rank == 0 and segment is not None:
        os.close(segment.descriptor)  # all who could have opened it; the mapping stays
    for rank, trouble in enumerate(failures):
        if trouble:
            raise OSError(f"rank {rank} {trouble}")
    assert segment is not None
    return SharedSegment(segment, layout, pids)
