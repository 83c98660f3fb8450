"""What a collective does with the numbers: the operations, and on which dtypes they make sense."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch

from farandole.errors import UserError, nearest

Op = Literal["sum", "average", "min", "max", "product"]

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
_HALF = (torch.float16, torch.bfloat16)


@functools.lru_cache(maxsize=256)
def check_op(op: Op, dtype: torch.dtype) -> None:
    """Raises `UserError` for an unknown operation or one that `dtype` has no sense for."""
    if op not in get_args(Op):
        raise UserError(f"no operation {op!r} for a reduction. {nearest(op, get_args(Op))}")
    if dtype == torch.bool and op in ("sum", "average"):
        raise UserError(f"a bool has no {op}; use op='max' for any, op='min' for all.")
    if op == "average" and not (dtype.is_floating_point or dtype.is_complex):
        raise UserError(f"the average of {dtype} is no {dtype}; use op='sum' and divide.")
    if dtype.is_complex and op in ("min", "max"):
        raise UserError(f"complex numbers have no order, so no {op}.")


def combine_(into: torch.Tensor, other: torch.Tensor, op: Op) -> None:
    """`into` becomes the two combined. An average is a sum until all are in: then `divide_`."""
    _FUNCTIONS["sum" if op == "average" else op](into, other, out=into)


def divide_(total: torch.Tensor, op: Op, count: int) -> None:
    """The last step of an average; nothing for the other operations."""
    if op == "average":
        total.div_(count)


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op) -> None:
    """All parts, combined in the order given, into `out`, which may be one of them.

    The order is what makes results reproducible. Halves are summed in float32 and rounded once.
    """
    function = _FUNCTIONS["sum" if op == "average" else op]
    if len(parts) == 1:
        if parts[0] is not out:
            out.copy_(parts[0])
        return
    if out.dtype in _HALF and op not in ("min", "max"):
        total = parts[0].float()
        for part in parts[1:]:
            function(total, part, out=total)  # promotes `part` on the fly
        divide_(total, op, len(parts))
        out.copy_(total)
        return
    # `out` may be a later part, and is then written only when all others are in.
    later = any(part is out for part in parts[2:])
    total = function(parts[0], parts[1]) if later else function(parts[0], parts[1], out=out)
    for part in parts[2:-1]:
        function(total, part, out=total)
    if len(parts) > 2:
        function(total, parts[-1], out=out)
    divide_(out, op, len(parts))
