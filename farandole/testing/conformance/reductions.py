"""All-reduce and reduce-scatter: every operation, dtype, length and algorithm."""

from __future__ import annotations

import functools

import torch

from farandole.comm import Group, Op
from farandole.errors import UserError
from farandole.schedule import piece
from farandole.testing.conformance.material import (
    DTYPES,
    LARGE,
    LENGTHS,
    REGISTERED,
    WAYS,
    made,
    ops,
    reduced,
    require_equal,
    require_error,
    require_same_bits,
)

_MIXED: tuple[tuple[Op, torch.dtype], ...] = (
    ("max", torch.int64),
    ("product", torch.bfloat16),
    ("min", torch.bool),
)


def check_all_reduce_of_every_dtype(group: Group) -> None:
    for dtype in DTYPES:
        for op in ops(dtype):
            parts = [made(rank, (3, 5), dtype) for rank in range(group.size)]
            mine = parts[group.rank].clone()
            result = group.all_reduce(mine, op)
            assert result is mine, "all_reduce works in place and returns its argument"
            require_equal(mine, reduced(parts, op), f"all_reduce {op} of {dtype}")


def check_all_reduce_of_every_length_by_every_algorithm(group: Group) -> None:
    for algorithm in WAYS:
        for length in LENGTHS:
            parts = [made(rank, (length,), salt=length) for rank in range(group.size)]
            mine = group.all_reduce(parts[group.rank].clone(), algorithm=algorithm)
            require_equal(mine, reduced(parts, "sum"), f"{algorithm} of {length} elements")


def check_all_reduce_with_every_operation_by_every_algorithm(group: Group) -> None:
    for algorithm in WAYS:
        for op, dtype in _MIXED:
            parts = [made(rank, (11,), dtype) for rank in range(group.size)]
            mine = group.all_reduce(parts[group.rank].clone(), op, algorithm=algorithm)
            require_equal(mine, reduced(parts, op), f"{algorithm} {op} of {dtype}")


def check_all_reduce_of_much(group: Group) -> None:
    for algorithm in ("native", "ring"):
        parts = [made(rank, (LARGE,)) for rank in range(group.size)]
        mine = group.all_reduce(parts[group.rank].clone(), algorithm=algorithm)
        require_equal(mine, reduced(parts, "sum"), f"{algorithm} of {LARGE} elements")


def check_all_ranks_get_the_same_bits(group: Group) -> None:
    """Where the order of adding matters, ranks must not differ in it."""
    for algorithm in WAYS:
        for dtype in (torch.float32, torch.bfloat16) if algorithm == "native" else (torch.float32,):
            parts = [_random(rank, dtype) for rank in range(group.size)]
            mine = group.all_reduce(parts[group.rank].clone(), algorithm=algorithm)
            require_same_bits(group, mine, f"{algorithm} of {dtype}")
            exact = torch.stack([part.double() for part in parts]).sum(0)
            slack = group.size * torch.finfo(dtype).eps * torch.stack(parts).double().abs().sum(0)
            assert ((mine.double() - exact).abs() <= slack).all(), f"{algorithm} of {dtype}"


def check_not_a_number_is_the_same_everywhere(group: Group) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1.0])
    parts = [odd.roll(rank) for rank in range(group.size)]
    for op in ops(odd.dtype):
        mine = group.all_reduce(parts[group.rank].clone(), op)
        require_same_bits(group, mine, f"{op} with a NaN")
        if op not in ("min", "max"):  # there transports differ in what a NaN stands for
            require_equal(mine.isnan(), reduced(parts, op).isnan(), f"the NaN of a {op}")


def check_all_reduce_of_tensors_that_do_not_lie_in_a_row(group: Group) -> None:
    whole = torch.zeros(6, 8)
    strided = whole[::2, ::3]
    strided.copy_(made(group.rank, strided.shape))
    group.all_reduce(strided)
    wanted = reduced([made(rank, strided.shape) for rank in range(group.size)], "sum")
    require_equal(whole[::2, ::3], wanted, "a strided view")
    assert whole.sum() == wanted.sum(), "all_reduce wrote beside the view"

    turned = made(group.rank, (4, 3)).t()
    group.all_reduce(turned, "average", algorithm="ring")
    wanted = reduced([made(rank, (4, 3)) for rank in range(group.size)], "average")
    require_equal(turned, wanted.t(), "a transposed matrix")

    scalar = group.all_reduce(torch.tensor(2.0))
    require_equal(scalar, torch.tensor(2.0 * group.size), "a tensor without dimensions")

    parameter = torch.nn.Parameter(torch.ones(3))
    group.all_reduce(parameter)
    require_equal(parameter.detach(), torch.full((3,), float(group.size)), "a parameter")


def check_all_reduce_of_registered_memory(group: Group) -> None:
    parts = [made(rank, (LARGE,)) for rank in range(group.size)]
    mine = parts[group.rank].clone()
    with group.register(mine):
        require_equal(mine, parts[group.rank], "a tensor after it was registered")
        group.all_reduce(mine[7:100_007])
        group.all_reduce(mine[200_000:], "max")
        require_equal(mine[:7], parts[group.rank][:7], "what was not reduced")
    require_equal(mine[7:100_007], reduced(parts, "sum")[7:100_007], "a registered part")
    require_equal(mine[200_000:], reduced(parts, "max")[200_000:], "the rest of it")


def check_registered_memory_of_every_dtype(group: Group) -> None:
    """Long enough that ranks write into each other's memory, in several blocks of uneven length."""
    for dtype in DTYPES:
        for op in ops(dtype):
            parts = [made(rank, (REGISTERED,), dtype) for rank in range(group.size)]
            mine = parts[group.rank].clone()
            with group.register(mine):
                for _ in range(2):  # the second time from what was kept of the first
                    mine.copy_(parts[group.rank])
                    group.all_reduce(mine[3:], op)
            what = f"{op} of registered {dtype}"
            require_equal(mine[3:], reduced(parts, op)[3:], what)
            require_equal(mine[:3], parts[group.rank][:3], f"what lies before the {what}")


def check_all_reduce_of_views_with_another_sign(group: Group) -> None:
    """`x.conj().imag` is a view: its numbers are those of the memory with the other sign."""
    parts = [made(rank, (5,), torch.complex64) for rank in range(group.size)]
    wanted = reduced([part.conj().imag.clone() for part in parts], "max")
    turned = parts[group.rank].clone().conj().imag
    require_equal(group.all_reduce(turned, "max"), wanted, "an imaginary part")
    require_equal(
        group.all_reduce(parts[group.rank].clone().conj().imag[:1], "max"),
        wanted[:1],
        "one imaginary number",
    )
    whole = torch._neg_view(made(group.rank, (70_001,)))
    lowest = reduced([-made(rank, (70_001,)) for rank in range(group.size)], "min")
    require_equal(group.all_reduce(whole, "min"), lowest, "a negative view")


def check_reduce_scatter(group: Group) -> None:
    for dtype in DTYPES:
        for op in ops(dtype) if dtype == torch.float32 else ops(dtype)[:1]:
            _scatter(group, (2 * group.size + 1, 3), dtype, op)


def check_reduce_scatter_of_every_length(group: Group) -> None:
    for rows in (0, 1, group.size - 1, group.size, 100):
        _scatter(group, (rows,), torch.float32, "sum")
    _scatter(group, (3, 0), torch.float32, "sum")
    _scatter(group, (LARGE,), torch.float32, "average")
    parts = [made(rank, (3, 5)).t() for rank in range(group.size)]
    share = piece(group.rank, group.size, 5)
    wanted = reduced(parts, "sum")[share.start : share.stop]
    require_equal(group.reduce_scatter(parts[group.rank]), wanted, "rows of a transposed matrix")


def check_what_makes_no_sense_is_refused(group: Group) -> None:
    """On every rank by itself, before anything is sent; so the group stays in step."""
    for op, dtype in (
        ("sum", torch.bool),
        ("average", torch.bool),
        ("average", torch.int32),
        ("max", torch.complex64),
        ("xor", torch.float32),
    ):
        for reduce in (group.all_reduce, group.reduce_scatter):
            call = functools.partial(reduce, torch.ones(2, dtype=dtype), op)  # type: ignore[arg-type]
            require_error(UserError, call, f"{op} of {dtype}")
    misspelt = functools.partial(group.all_reduce, torch.ones(2), algorithm="rign")
    assert "ring" in require_error(UserError, misspelt, "an unknown algorithm")
    scalar = functools.partial(group.reduce_scatter, torch.tensor(1.0))
    require_error(UserError, scalar, "rows of a tensor without dimensions")


def _scatter(group: Group, shape: tuple[int, ...], dtype: torch.dtype, op: Op) -> None:
    parts = [made(rank, shape, dtype) for rank in range(group.size)]
    mine = parts[group.rank].clone()
    result = group.reduce_scatter(mine, op)
    share = piece(group.rank, group.size, shape[0])
    what = f"reduce_scatter {op} of {dtype} {shape}"
    require_equal(result, reduced(parts, op)[share.start : share.stop], what)
    require_equal(mine, parts[group.rank], f"the argument of {what}")


def _random(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    spread = torch.logspace(-3, 3, 4099)  # so that the order of adding shows
    return (torch.randn(4099, generator=generator) * spread).to(dtype)


CHECKS = (
    check_all_reduce_of_every_dtype,
    check_all_reduce_of_every_length_by_every_algorithm,
    check_all_reduce_with_every_operation_by_every_algorithm,
    check_all_reduce_of_much,
    check_all_ranks_get_the_same_bits,
    check_not_a_number_is_the_same_everywhere,
    check_all_reduce_of_tensors_that_do_not_lie_in_a_row,
    check_all_reduce_of_registered_memory,
    check_registered_memory_of_every_dtype,
    check_all_reduce_of_views_with_another_sign,
    check_reduce_scatter,
    check_reduce_scatter_of_every_length,
    check_what_makes_no_sense_is_refused,
)
