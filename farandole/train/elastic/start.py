"""`fd.init` in a job whose workers come and go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

from farandole.comm import Group
from farandole.comm.transports.promised import Promised
from farandole.environment import ELASTIC_MOST
from farandole.train.elastic.training import ElasticTraining
from farandole.worker.generations import Generations


def most_workers(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many workers such a job may have; None: this is none."""
    said = environ.get(ELASTIC_MOST)
    return int(said) if said else None


def join_elastic(timeout: timedelta, transport: str) -> tuple[Group, ElasticTraining]:
    """This worker's end of the first generation, or of the one that it will join later."""
    generations = Generations(timeout, transport)
    joined = generations.first()
    found = joined.transport
    if found is None:
        found = Promised(joined.assignment.rank, joined.assignment.size, timeout)
    group = Group(found, members=joined.members or None)
    group.most_ranks = most_workers() or group.size
    return group, ElasticTraining(group, generations, joined)
