"""Collectives that run while the caller does something else."""

from __future__ import annotations

import torch

from farandole.comm import Group
from farandole.errors import CommError
from farandole.testing.conformance.material import made, reduced, require_equal, require_error


def check_handles_in_any_order_of_waiting(group: Group) -> None:
    tensors = [made(group.rank, (100 * n,), salt=n) for n in range(12)]
    handles = [group.start(group.all_reduce, tensor, "max") for tensor in tensors]
    for n in reversed(range(12)):
        assert handles[n].wait() is tensors[n]
        assert handles[n].done()
        parts = [made(rank, (100 * n,), salt=n) for rank in range(group.size)]
        require_equal(tensors[n], reduced(parts, "max"), f"all-reduce {n} in the background")


def check_direct_calls_come_after_what_was_started(group: Group) -> None:
    """Ranks need only begin in the same order: what runs behind what is the group's business."""
    running = torch.zeros(1)
    for step in range(1, 6):
        mine = torch.full((3000,), float(step))
        handle = group.start(group.all_reduce, mine)
        gathered = group.start(group.all_gather, torch.tensor([group.rank]))
        group.all_reduce(running.add_(step), "max")  # must find both done
        assert handle.done()
        assert gathered.done()
        require_equal(running, torch.tensor([step * (step + 1) / 2]), "a direct all-reduce")
        require_equal(mine, torch.full((3000,), float(step * group.size)), "the one before it")
        ranks = torch.stack(gathered.wait()).flatten().tolist()
        assert ranks == list(range(group.size)), ranks


def check_every_collective_in_the_background(group: Group) -> None:
    last = group.size - 1
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    scattered = group.start(group.reduce_scatter, torch.ones(group.size))
    sent = group.start(group.broadcast, torch.full((2,), group.rank), source=last)
    swapped = group.start(group.all_to_all, [torch.tensor([group.rank])] * group.size)
    told = group.start(group.gather_json, group.rank)
    met = group.start(group.barrier)
    if group.size > 1 and group.rank == 0:
        group.start(group.send, torch.tensor([0]), after)
        assert group.start(group.receive, torch.tensor([-1]), before).wait() == last
    elif group.size > 1:
        assert group.start(group.receive, torch.tensor([-1]), before).wait() == before
        group.start(group.send, torch.tensor([group.rank]), after)
    assert met.wait() is None
    assert told.wait() == list(range(group.size))
    assert torch.cat(swapped.wait()).tolist() == list(range(group.size))
    require_equal(sent.wait(), torch.full((2,), last), "a broadcast in the background")
    require_equal(scattered.wait(), torch.tensor([float(group.size)]), "a reduce-scatter")


def check_a_failure_is_raised_where_it_is_waited_for(group: Group) -> None:
    if group.size == 1:
        return
    handle = group.start(group.all_reduce, torch.ones(2 + group.rank))
    after = group.start(group.all_reduce, torch.ones(1))
    said = require_error(CommError, handle.wait, "tensors of different lengths")
    assert "all_reduce" in said
    assert handle.done()
    require_equal(after.wait(), torch.tensor([float(group.size)]), "the next one")


CHECKS = (
    check_handles_in_any_order_of_waiting,
    check_direct_calls_come_after_what_was_started,
    check_every_collective_in_the_background,
    check_a_failure_is_raised_where_it_is_waited_for,
)
