"""All-reduce and reduce-scatter: every function, operation and kind of number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.errors import UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.horovod.torch.compression import Compressor
from farandole.testing.horovod import run_horovod

SIZES = pytest.mark.parametrize("size", [1, 2, 4])
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Small whole numbers, which all dtypes have: sums and products of them are exact."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + rank) % 3 + 1).reshape(shape).to(dtype)


def combined(op: hvd.ReduceOp, every: list[torch.Tensor]) -> torch.Tensor:
    """The direct way."""
    if op == hvd.Min:
        return torch.stack(every).amin(0)
    if op == hvd.Max:
        return torch.stack(every).amax(0)
    total = every[0].clone()
    for one in every[1:]:
        total = total * one if op == hvd.Product else total + one
    if op != hvd.Average:
        return total
    if total.is_floating_point() or total.is_complex():
        return total / len(every)
    return total.div(len(every), rounding_mode="trunc").to(total.dtype)


def everybody(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [given(rank, *shape, dtype=dtype) for rank in range(hvd.size())]


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)


# Every operation and dtype

FOUR_WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "sync": lambda x, **options: hvd.allreduce(x, **options),
    "in place": lambda x, **options: hvd.allreduce_(x, **options),
    "async": lambda x, **options: hvd.synchronize(hvd.allreduce_async(x, **options)),
    "async in place": lambda x, **options: hvd.synchronize(hvd.allreduce_async_(x, **options)),
}


@SIZES
@pytest.mark.parametrize("way", FOUR_WAYS)
def test_allreduce_of_every_kind_of_number(size: int, way: str) -> None:
    def body() -> None:
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            ordered = [] if op in (hvd.Min, hvd.Max) else COMPLEX
            for dtype in FLOATS + WHOLE + ordered:
                every = everybody(2, 3, dtype=dtype)
                mine = every[hvd.rank()].clone()
                result = FOUR_WAYS[way](mine, op=op)
                same(result, combined(op, every))
                if "in place" in way:
                    assert result is mine
                else:
                    assert torch.equal(mine, every[hvd.rank()])

    run_horovod(size, body)


@SIZES
def test_an_average_fits_where_the_sum_does_not(size: int) -> None:
    def body() -> None:
        x = torch.full((size * 2, 3), 200, dtype=torch.uint8)
        assert torch.equal(hvd.allreduce(x), x)
        assert torch.equal(hvd.reducescatter(x), x[:2])
        low = torch.full((3,), -100 - hvd.rank(), dtype=torch.int8)
        assert hvd.allreduce(low).tolist() == [-100 - (size - 1) // 2] * 3  # towards zero

    run_horovod(size, body)


@SIZES
def test_bool(size: int) -> None:
    def body() -> None:
        mine = torch.tensor([True, hvd.rank() == 0, False])
        every, some = [True, size == 1, False], [True, True, False]
        for op, expected in (
            (hvd.Sum, some),
            (hvd.Max, some),
            (hvd.Min, every),
            (hvd.Product, every),
        ):
            result = hvd.allreduce(mine, op=op)
            assert result.dtype == torch.bool
            assert result.tolist() == expected
            (again,) = hvd.grouped_allreduce([mine], op=op)
            assert again.tolist() == expected
        for op in (hvd.Average, hvd.Adasum):
            with pytest.raises(UserError, match="a bool has no"):
                hvd.allreduce(mine, op=op)

    run_horovod(size, body)


@SIZES
@pytest.mark.parametrize("way", FOUR_WAYS)
def test_tensors_of_any_form(size: int, way: str) -> None:
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda x: x.t(),
        "every other": lambda x: x[::2, 1:],
        "one column": lambda x: x[:, 1],
        "no dimensions": lambda x: x[0, 1],
        "no elements": lambda x: x[:0],
        "channels last": lambda x: x.reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "part": lambda x: x[1:3],
        "large": lambda x: x.repeat(100, 100),
    }

    def body() -> None:
        for name, form in forms.items():
            every = [form(given(rank, 6, 4)) for rank in range(hvd.size())]
            mine = form(given(hvd.rank(), 6, 4))
            result = FOUR_WAYS[way](mine, op=hvd.Sum, name=name)
            same(result, combined(hvd.Sum, every))
            assert result.shape == mine.shape

    run_horovod(size, body)


@SIZES
def test_conjugates_and_parts_of_complex_numbers(size: int) -> None:
    def body() -> None:
        every = [torch.complex(given(rank, 3), given(rank + 1, 3)) for rank in range(size)]
        mine = every[hvd.rank()]
        same(hvd.allreduce(mine.conj(), op=hvd.Sum), combined(hvd.Sum, [x.conj() for x in every]))
        same(hvd.allreduce(mine.imag, op=hvd.Sum), combined(hvd.Sum, [x.imag for x in every]))
        negative = [x.conj().imag for x in every]
        same(hvd.allreduce(negative[hvd.rank()], op=hvd.Sum), combined(hvd.Sum, negative))
        assert torch.equal(mine, every[hvd.rank()])

    run_horovod(size, body)


@SIZES
def test_a_parameter_is_combined_in_place_without_a_gradient(size: int) -> None:
    def body() -> None:
        weight = torch.nn.Parameter(given(hvd.rank(), 4))
        assert hvd.allreduce_(weight, op=hvd.Sum) is weight
        same(weight.detach(), combined(hvd.Sum, everybody(4)))
        hvd.allreduce_(weight, prescale_factor=2.0)
        hvd.grouped_allreduce_([weight, weight.detach().clone()], op=hvd.Max)
        same(weight.detach(), 2 * combined(hvd.Sum, everybody(4)))
        assert weight.is_leaf
        assert weight.requires_grad

    run_horovod(size, body)


@SIZES
def test_the_old_argument(size: int) -> None:
    def body() -> None:
        mine = given(hvd.rank(), 4)
        same(hvd.allreduce(mine, True), combined(hvd.Average, everybody(4)))
        same(hvd.allreduce(mine, average=False), combined(hvd.Sum, everybody(4)))
        same(hvd.allreduce(mine), combined(hvd.Average, everybody(4)))
        (one,) = hvd.grouped_allreduce([mine], average=False)
        same(one, combined(hvd.Sum, everybody(4)))
        with pytest.raises(UserError, match="not both"):
            hvd.allreduce(mine, average=True, op=hvd.Sum)

    run_horovod(size, body)


@SIZES
def test_factors(size: int) -> None:
    def body() -> None:
        scales = {"prescale_factor": 0.5, "postscale_factor": 3.0}
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            total = combined(hvd.Sum, everybody(4, dtype=dtype))
            mine = given(hvd.rank(), 4, dtype=dtype)
            same(hvd.allreduce(mine, op=hvd.Sum, **scales), total * 1.5)
            same(hvd.allreduce(mine, **scales), total * 1.5 / size)
            for one in hvd.grouped_allreduce([mine, mine], op=hvd.Sum, **scales):
                same(one, total * 1.5)
            rows = given(hvd.rank(), size, 2, dtype=dtype)
            expected = combined(hvd.Sum, everybody(size, 2, dtype=dtype))[hvd.rank()] * 1.5
            same(hvd.reducescatter(rows, op=hvd.Sum, **scales)[0], expected)
            assert torch.equal(rows, given(hvd.rank(), size, 2, dtype=dtype))
            hvd.allreduce_(mine, op=hvd.Sum, **scales)
            same(mine, total * 1.5)
        # Whole numbers are cut off: 0.5 · 5 is 2.
        half = hvd.allreduce(torch.tensor([5, -5]), op=hvd.Sum, prescale_factor=0.5)
        assert half.tolist() == [2 * size, -2 * size]
        # The maximum of what was made negative is the least.
        most = hvd.allreduce(given(hvd.rank(), 4), op=hvd.Max, prescale_factor=-1.0)
        same(most, -combined(hvd.Min, everybody(4)))

    run_horovod(size, body)


@SIZES
def test_adasum(size: int) -> None:
    def body() -> None:
        axis = torch.zeros(4, dtype=torch.float64)
        axis[hvd.rank()] = 2.0
        expected = torch.tensor([2.0] * size + [0.0] * (4 - size), dtype=torch.float64)
        same(hvd.allreduce(axis, op=hvd.Adasum), expected)  # orthogonal: added
        same(hvd.allreduce(torch.ones(3), op=hvd.Adasum), torch.ones(3))  # equal: averaged
        pair = hvd.grouped_allreduce([axis, torch.ones(3)], op=hvd.Adasum)
        same(pair[0], expected)
        same(pair[1], torch.ones(3))
        same(hvd.allreduce(axis.t(), op=hvd.Adasum, postscale_factor=0.5), expected / 2)
        for wrong in (torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.complex64)):
            with pytest.raises(UserError):
                hvd.allreduce(wrong, op=hvd.Adasum)

    run_horovod(size, body)


# Compression


class Halved(Compressor):
    """A user's own: half of each number, as a column."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor / 2).reshape(-1, 1), tensor.shape

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor * 2).reshape(ctx)


@SIZES
@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16, Halved]
)
def test_compression(size: int, compression: type[Compressor]) -> None:
    def body() -> None:
        every = everybody(2, 3)
        mine = every[hvd.rank()]
        same(hvd.allreduce(mine, compression=compression), combined(hvd.Average, every))
        both = hvd.grouped_allreduce([mine, mine.float()], compression=compression, op=hvd.Sum)
        same(both[0], combined(hvd.Sum, every))
        same(both[1], combined(hvd.Sum, every).float())
        if compression is not Halved:  # of which the rows are shared, after they were made columns
            rows = given(hvd.rank(), size, 2)
            mean = combined(hvd.Average, everybody(size, 2))[hvd.rank()]
            same(hvd.reducescatter(rows, compression=compression)[0], mean)
        whole = torch.full((2,), 1 << 20)  # too large for a half
        if compression is not Halved:
            same(hvd.allreduce(whole, compression=compression), whole)

    run_horovod(size, body)


# Several at once


@SIZES
def test_grouped_in_every_way(size: int) -> None:
    def body() -> None:
        shapes = [((3,), torch.float32), ((), torch.float64), ((2, 2), torch.float32)]
        shapes += [((4,), torch.int64), ((0, 2), torch.bfloat16), ((5,), torch.bfloat16)]
        mine = [given(hvd.rank(), *shape, dtype=dtype) for shape, dtype in shapes]
        sums = [combined(hvd.Sum, everybody(*shape, dtype=dtype)) for shape, dtype in shapes]
        results = [
            hvd.grouped_allreduce(mine, op=hvd.Sum),
            hvd.grouped_allreduce(tuple(mine), op=hvd.Sum, name="named"),
            hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)),
        ]
        for result in results:
            for one, expected in zip(result, sums, strict=True):
                same(one, expected)
        for way in ("sync", "async"):
            own = [one.clone() for one in mine]
            if way == "sync":
                result = hvd.grouped_allreduce_(own, op=hvd.Sum)
            else:
                result = hvd.synchronize(hvd.grouped_allreduce_async_(own, op=hvd.Sum))
            for one, target, expected in zip(result, own, sums, strict=True):
                assert one is target
                same(one, expected)
        several = [given(hvd.rank(), 4, 3).t(), given(hvd.rank(), 2, 6)[:, ::2]]
        first, second = hvd.grouped_allreduce_(several, op=hvd.Sum)
        same(first, combined(hvd.Sum, [x.t() for x in everybody(4, 3)]))
        same(second, combined(hvd.Sum, [x[:, ::2] for x in everybody(2, 6)]))

    run_horovod(size, body)


# Sparse


def sparse_of(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows 0 and rank + 1, the former twice."""
    places = torch.tensor([[0, rank + 1, 0]])
    values = given(rank, 3, 2, dtype=dtype)
    return torch.sparse_coo_tensor(places, values, (6, 2), check_invariants=True)


@SIZES
def test_sparse(size: int) -> None:
    def body() -> None:
        mine = sparse_of(hvd.rank())
        total = combined(hvd.Sum, [sparse_of(rank).to_dense() for rank in range(size)])
        for result in (
            hvd.sparse_allreduce(mine, op=hvd.Sum),
            hvd.sparse_allreduce(mine, "named", hvd.Sum),
            hvd.sparse_allreduce_async(mine, name="async", op=hvd.Sum)(),
            hvd.synchronize(hvd.sparse_allreduce_async(mine, name="handle", op=hvd.Sum)),
            hvd.allreduce(mine, op=hvd.Sum),
        ):
            assert result.is_sparse
            assert result.is_coalesced()
            same(result.to_dense(), total)
        same(hvd.allreduce(mine).to_dense(), total / size)
        same(hvd.sparse_allreduce(mine).to_dense(), total / size)
        nothing = torch.zeros(3).to_sparse()
        assert hvd.allreduce(nothing, op=hvd.Sum).to_dense().tolist() == [0.0] * 3
        if hvd.rank() > 0:
            mine = torch.zeros(6, 2, dtype=torch.float64).to_sparse(1)
        same(hvd.allreduce(mine, op=hvd.Sum).to_dense(), sparse_of(0).to_dense())
        for op in (hvd.Max, hvd.Adasum):
            with pytest.raises(UserError, match="Average and Sum, not by"):
                hvd.allreduce(mine, op=op)
        with pytest.raises(UserError, match="wants a sparse COO tensor"):
            hvd.sparse_allreduce_async(torch.ones(2))
        with pytest.raises(UserError, match="use sparse_allreduce_async"):
            hvd.allreduce_(mine)
        for options in ({"prescale_factor": 2.0}, {"compression": hvd.Compression.fp16}):
            with pytest.raises(UserError, match="sparse"):
                hvd.allreduce(mine, **options)

    run_horovod(size, body)


@SIZES
def test_a_sparse_average_of_whole_numbers_stays_whole(size: int) -> None:
    def body() -> None:
        result = hvd.sparse_allreduce(sparse_of(hvd.rank(), torch.int64))
        total = combined(hvd.Sum, [sparse_of(r, torch.int64).to_dense() for r in range(size)])
        assert result.dtype == torch.int64
        assert result.to_dense().tolist() == (total // size).tolist()

    run_horovod(size, body)


# Reduce-scatter


@SIZES
@pytest.mark.parametrize("rows", [0, 3, 10])
def test_reducescatter(size: int, rows: int) -> None:
    def body() -> torch.Tensor:
        for op, dtype in (
            (hvd.Average, torch.float16),
            (hvd.Average, torch.int32),
            (hvd.Sum, torch.float64),
            (hvd.Min, torch.bfloat16),
            (hvd.Max, torch.int64),
            (hvd.Product, torch.float64),
        ):
            expected = combined(op, everybody(rows, 2, dtype=dtype))
            mine = given(hvd.rank(), rows, 2, dtype=dtype)
            part = hvd.reducescatter(mine, op=op)
            same(hvd.allgather(part), expected)
            handle = hvd.reducescatter_async(mine.t().contiguous().t(), op=op)
            same(hvd.synchronize(handle), part)
            both = hvd.grouped_reducescatter([mine, mine[:, 0]], op=op)
            again = hvd.synchronize(hvd.grouped_reducescatter_async([mine], op=op))
            for one, wanted in zip((*both, *again), (part, part[:, 0], part), strict=True):
                same(one, wanted)
        return part

    shares = [len(part) for part in run_horovod(size, body)]
    assert sum(shares) == rows
    assert shares == sorted(shares, reverse=True)  # the first ones get those left over
    assert max(shares) - min(shares) <= 1


def test_what_a_reducescatter_cannot_do() -> None:
    def body() -> None:
        with pytest.raises(HorovodInternalError, match="Adasum needs whole tensors"):
            hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
        with pytest.raises(UserError, match="a tensor without dimensions has none"):
            hvd.reducescatter(torch.tensor(1.0))
        with pytest.raises(UserError, match="at least one tensor"):
            hvd.grouped_reducescatter([])

    run_horovod(1, body)


# Gradients


@SIZES
def test_the_gradient_of_an_allreduce_is_combined_alike(size: int) -> None:
    def body() -> None:
        weights = everybody(4)
        for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / size)):
            total = combined(hvd.Sum, weights) * factor
            x = given(hvd.rank(), 4).requires_grad_()
            y = hvd.allreduce(x, name="x", op=op)
            (y * weights[hvd.rank()]).sum().backward()
            assert x.grad is not None
            same(x.grad, total)
            x.grad = None
            a, b = hvd.grouped_allreduce([x, x * 2], op=op)
            ((a + b) * weights[hvd.rank()]).sum().backward()
            same(x.grad, total * 3)
            x.grad = None
            hvd.allreduce(x, op=op, prescale_factor=3.0, postscale_factor=0.5).sum().backward()
            same(x.grad, torch.full_like(x, 1.5 * size * factor))
            half = torch.ones(3, requires_grad=True)
            hvd.allreduce(half, compression=hvd.Compression.fp16, op=op).sum().backward()
            same(half.grad, torch.full((3,), size * factor))

    run_horovod(size, body)


@SIZES
def test_the_gradient_of_a_gradient(size: int) -> None:
    def body() -> None:
        x = given(hvd.rank(), 3).requires_grad_()
        y = hvd.allreduce(x, op=hvd.Sum)
        (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        # d/dx of Σ over ranks of 2 y, where y is the sum of all x.
        same(first.detach(), 2 * size * y.detach())

    run_horovod(size, body)


@SIZES
def test_the_gradient_of_a_reducescatter(size: int) -> None:
    """As Horovod has it: that of an average is gathered as it is, of a sum as often as ranks."""

    def body() -> None:
        for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(size))):
            x = torch.zeros(size * 2, 3, requires_grad=True)
            y = hvd.reducescatter(x, op=op, name="x")
            (y * (hvd.rank() + 1)).sum().backward()
            rows = [factor * (row // 2 + 1) for row in range(size * 2)]
            assert x.grad is not None
            assert x.grad.tolist() == [[row] * 3 for row in rows]
            x.grad = None
            a, b = hvd.grouped_reducescatter([x, x], op=op, prescale_factor=2.0)
            ((a + b) * (hvd.rank() + 1)).sum().backward()
            assert x.grad[:, 0].tolist() == [4 * row for row in rows]

    run_horovod(size, body)


def test_no_gradient_where_none_is_defined_or_wanted() -> None:
    def body() -> None:
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(UserError, match="max has no gradient here; Average and Sum have"):
            hvd.allreduce(x, op=hvd.Max).sum().backward()
        with pytest.raises(UserError, match="min has no gradient"):
            hvd.grouped_allreduce([x], op=hvd.Min)[0].sum().backward()
        with pytest.raises(UserError, match="product has no gradient"):
            hvd.reducescatter(x, op=hvd.Product).sum().backward()
        with torch.no_grad():
            assert not hvd.allreduce(x).requires_grad
        assert not hvd.allreduce(x.detach()).requires_grad

    run_horovod(2, body)


@SIZES
def test_a_group_in_which_some_have_no_gradient(size: int) -> None:
    def body() -> None:
        x = torch.ones(2, requires_grad=True)
        whole, fixed = torch.ones(2, dtype=torch.int64), torch.ones(2)
        a, b, c = hvd.grouped_allreduce([x, whole, fixed], op=hvd.Sum)
        assert b.tolist() == [size, size]
        (a * c.detach()).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [float(size) * size] * 2

    run_horovod(size, body)


# Process sets


def test_process_sets() -> None:
    def body() -> None:
        rank = hvd.rank()
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
        mine, other = (even, odd) if rank % 2 == 0 else (odd, even)
        members = [given(r, 4) for r in range(rank % 2, 4, 2)]
        x = given(rank, 4)
        same(hvd.allreduce(x, process_set=mine), combined(hvd.Average, members))
        (one,) = hvd.grouped_allreduce([x], op=hvd.Sum, process_set=mine)
        same(one, combined(hvd.Sum, members))
        part = hvd.reducescatter(x, op=hvd.Sum, process_set=mine)
        same(part, combined(hvd.Sum, members).chunk(2)[rank // 2])
        sparse = torch.ones(2).to_sparse()
        assert hvd.allreduce(sparse, process_set=mine).to_dense().tolist() == [1.0, 1.0]
        x.requires_grad_()
        hvd.allreduce(x, op=hvd.Sum, process_set=mine).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 4
        for collective in (hvd.allreduce, hvd.allreduce_async, hvd.reducescatter):
            with pytest.raises(UserError, match=f"rank {rank} is not in the process set"):
                collective(x, process_set=other)
        with pytest.raises(UserError, match=r"is not known. Add it with hvd.add_process_set"):
            hvd.allreduce(x, process_set=hvd.ProcessSet([0, 1]))

    run_horovod(4, body)


# Wrong arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.allreduce(torch.ones(2), op="sums"), "no reduction 'sums'.*sum"),
        (lambda: hvd.allreduce(torch.ones(2), op=1), "no reduction 1"),
        (lambda: hvd.allreduce(3.0), "allreduce wants a tensor, not a float"),
        (lambda: hvd.allreduce_([1.0]), "allreduce wants a tensor, not a list"),
        (lambda: hvd.grouped_allreduce([]), "at least one tensor"),
        (lambda: hvd.grouped_allreduce([torch.ones(2), 1]), "wants a tensor, not a int"),
        (lambda: hvd.grouped_allreduce(3), "several tensors, not a int"),
        (lambda: hvd.grouped_allreduce_([torch.ones(2).to_sparse()]), "sparse_allreduce_async"),
        (lambda: hvd.allreduce(torch.ones(2, dtype=torch.cfloat), op="max"), "complex numbers"),
        (lambda: hvd.reducescatter("x"), "wants a tensor, not a str"),
        (lambda: hvd.allreduce_(torch.ones(1).expand(3)), "share the same memory.*clone"),
        (lambda: hvd.sparse_allreduce(3), "wants a tensor, not a int"),
        (lambda: hvd.synchronize(7), "7 is not a handle"),
        (lambda: hvd.poll(None), "None is not a handle"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], message: str) -> None:
    def body() -> None:
        with pytest.raises(UserError, match=message):
            call()
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]

    run_horovod(2, body)
