"""What only moves: gather, broadcast, all-to-all, send and receive, JSON, and the barrier."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from farandole.comm import Group
from farandole.errors import UserError
from farandole.testing.conformance.material import DTYPES, LARGE, made, require_equal, require_error


def check_all_gather(group: Group) -> None:
    for dtype in DTYPES:
        _gather(group, [(3, 2)] * group.size, dtype)


def check_all_gather_of_uneven_shapes(group: Group) -> None:
    _gather(group, [(rank, 3) for rank in range(group.size)])
    _gather(group, [(1,) * rank for rank in range(group.size)])  # the first has no dimensions
    _gather(group, [(0,)] * group.size)
    _gather(group, [(LARGE if rank == 0 else 5,) for rank in range(group.size)])
    columns = [made(rank, (4, 3)).t() for rank in range(group.size)]
    for got, wanted in zip(group.all_gather(columns[group.rank]), columns, strict=True):
        require_equal(got, wanted, "a transposed matrix")


def check_gathered_tensors_are_the_caller_s(group: Group) -> None:
    mine = torch.ones(3)
    group.all_gather(mine)[group.rank].fill_(7)
    require_equal(mine, torch.ones(3), "the argument of all_gather")


def check_broadcast_from_every_rank(group: Group) -> None:
    for source in range(group.size):
        for length in (0, 1, 1000):
            mine = group.broadcast(made(group.rank, (length,)), source)
            require_equal(mine, made(source, (length,)), f"broadcast of {length} from {source}")


def check_broadcast_of_every_dtype(group: Group) -> None:
    source = group.size - 1
    for dtype in DTYPES:
        mine = made(group.rank, (2, 5), dtype)
        assert group.broadcast(mine, source) is mine, "broadcast works in place"
        require_equal(mine, made(source, (2, 5), dtype), f"broadcast of {dtype}")
    much = group.broadcast(made(group.rank, (LARGE,)), source)
    require_equal(much, made(source, (LARGE,)), f"broadcast of {LARGE} elements")


def check_broadcast_into_a_view(group: Group) -> None:
    source = group.size - 1
    whole = torch.zeros(4, 6)
    whole[:, ::2] = made(group.rank, (4, 3))
    group.broadcast(whole[:, ::2], source)
    require_equal(whole[:, ::2], made(source, (4, 3)), "a strided view")
    assert not whole[:, 1::2].any(), "broadcast wrote beside the view"


def check_broadcast_of_many(group: Group) -> None:
    shapes: list[tuple[int, ...]] = [(3,), (), (4, 5), (0, 2), (7,), (2, 2, 2)]
    kinds = [torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.bool, torch.float64]
    source = group.size - 1

    def tensors(rank: int) -> list[torch.Tensor]:
        return [made(rank, *each) for each in zip(shapes, kinds, strict=True)]

    mine = tensors(group.rank)
    mine[0].requires_grad_()  # as a parameter does
    mine[2] = mine[2].t().contiguous().t()  # and one that does not lie in a row
    group.broadcast_all(mine, source)
    for got, wanted in zip(mine, tensors(source), strict=True):
        require_equal(got.detach(), wanted, "one of many tensors")


def check_all_to_all(group: Group) -> None:
    for dtype in DTYPES:
        _exchange(group, lambda source, to: (2,), dtype)
    _exchange(group, lambda source, to: ((source + 2 * to) % 3, 4))  # some of no rows
    _exchange(group, lambda source, to: (0, 2))
    _exchange(group, lambda source, to: (LARGE if source == to + 1 else 3,))
    turned = [made(group.rank, (3, 2), salt=to).t() for to in range(group.size)]
    for source, got in enumerate(group.all_to_all(turned)):
        require_equal(got, made(source, (3, 2), salt=group.rank).t(), "a transposed matrix")
    too_many = functools.partial(group.all_to_all, [torch.ones(1)] * (group.size + 1))
    require_error(UserError, too_many, "more tensors than ranks")


def check_send_and_receive(group: Group) -> None:
    """Round in a circle: rank 0 sends first, the others when they have received."""
    for length in (0, 1, 1000, LARGE):
        token = made(0, (length,), torch.float64)
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        if group.size > 1 and group.rank == 0:
            group.send(token, after)
        if group.size > 1:
            got = group.receive(torch.zeros_like(token), before)
            require_equal(got, token, f"{length} elements from rank {before}")
        if group.size > 1 and group.rank > 0:
            group.send(got, after)
    for talk in (group.send, group.receive):
        to_itself = functools.partial(talk, torch.ones(1), group.rank)
        require_error(UserError, to_itself, "a rank that talks to itself")


def check_messages_keep_their_order(group: Group) -> None:
    if group.size == 1:
        return
    if group.rank == 0:
        for number in range(20):
            group.send(torch.full((number + 1,), number, dtype=torch.int16), 1)
    if group.rank == 1:
        whole = torch.zeros(40, dtype=torch.int16)
        for number in range(20):
            group.receive(whole[: 2 * number + 2 : 2], 0)
            wanted = torch.full((number + 1,), number, dtype=torch.int16)
            require_equal(whole[: 2 * number + 2 : 2], wanted, f"message {number}")
    group.barrier()


def check_json(group: Group) -> None:
    values: list[Any] = [None, 1.5, "żółw 🐢", [1, [2, {}]], {"a": [True, None]}, "long " * 10_000]
    for offset in range(len(values)):
        mine = [values[(rank + offset) % len(values)] for rank in range(group.size)]
        assert group.gather_json(mine[group.rank]) == mine
        source = offset % group.size
        assert group.broadcast_json(mine[group.rank], source) == mine[source]


def check_barrier_lets_nobody_through_early(group: Group) -> None:
    for late in range(group.size):
        if group.rank == late:
            time.sleep(0.02)
        came = time.monotonic()  # one clock for all processes of a host
        group.barrier()
        left = time.monotonic()
        times = group.gather_json([came, left])
        assert max(came for came, _ in times) <= min(left for _, left in times), times


def _gather(
    group: Group, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> None:
    mine = made(group.rank, shapes[group.rank], dtype)
    gathered = group.all_gather(mine)
    assert len(gathered) == group.size
    for rank, got in enumerate(gathered):
        require_equal(got, made(rank, shapes[rank], dtype), f"{dtype} gathered from rank {rank}")


def _exchange(group: Group, shape: Any, dtype: torch.dtype = torch.float32) -> None:
    given = [made(group.rank, shape(group.rank, to), dtype, salt=to) for to in range(group.size)]
    taken = group.all_to_all(given)
    assert len(taken) == group.size
    for source, got in enumerate(taken):
        wanted = made(source, shape(source, group.rank), dtype, salt=group.rank)
        require_equal(got, wanted, f"{dtype} from rank {source} to rank {group.rank}")


CHECKS = (
    check_all_gather,
    check_all_gather_of_uneven_shapes,
    check_gathered_tensors_are_the_caller_s,
    check_broadcast_from_every_rank,
    check_broadcast_of_every_dtype,
    check_broadcast_into_a_view,
    check_broadcast_of_many,
    check_all_to_all,
    check_send_and_receive,
    check_messages_keep_their_order,
    check_json,
    check_barrier_lets_nobody_through_early,
)
